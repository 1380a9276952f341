"""What a run writes down: events, training steps, progress lines."""

from dynatrain_megatron.observe.records import RunLog, progress

__all__ = ["RunLog", "progress"]
