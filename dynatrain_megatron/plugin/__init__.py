"""Attaches to Megatron's training loop: hooks, triggers and re-entry into ``train``."""

from dynatrain_megatron.plugin.hooks import attach, detach

__all__ = ["attach", "detach"]
