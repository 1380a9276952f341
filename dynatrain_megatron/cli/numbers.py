"""Numbers on command lines, for argparse; no command itself."""

import argparse
import math
import re

_MOST = 10**9 - 1


def count(text: str, most: int = _MOST) -> int:
    """A whole number from 1 to ``most``."""
    digits = text.lstrip("0")
    if not re.fullmatch("[0-9]+", digits):
        raise argparse.ArgumentTypeError(f"{text!r:.100} is not a whole number of at least 1")
    if len(digits) > len(str(most)) or int(digits) > most:
        raise argparse.ArgumentTypeError(f"{text!r:.100} is more than {most:,}")
    return int(digits)


def seconds(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
