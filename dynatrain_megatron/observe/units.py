"""Numbers as people read them: seconds and bytes with the unit that fits."""

_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def duration(seconds: float) -> str:
    """``38 ms`` below a second, ``2.77 s`` from there on."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(num_bytes: int) -> str:
    """``10.04 MB``, in powers of 1000."""
    unit, scale = size_unit(num_bytes)
    return f"{num_bytes} B" if unit == "B" else f"{num_bytes / scale:.2f} {unit}"


def scientific(value: float) -> str:
    """``1.3e-7``, and ``0`` for zero."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value and exponent else f"{value:.0f}"


def size_unit(num_bytes: int) -> tuple[str, float]:
    """The largest unit that is not above ``num_bytes``, and its bytes; for many values of one."""
    return next(((unit, scale) for unit, scale in _SIZES if num_bytes >= scale), _SIZES[-1])
