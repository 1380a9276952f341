"""Presets for Hydra, by group: ``model``, ``topology``, ``layout``, ``experiment``."""
