"""The configuration that overrides describe, without what ``cfg=job`` shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynatrain_megatron.config import DynaTrainConfig, compose


def config_of(overrides: Sequence[str], config_dir: Path | None = None) -> DynaTrainConfig:
    return compose(overrides, config_dir).config
