"""The protocol of a switch: check, prepare, move, verify, commit."""

from dynatrain_megatron.transition.check import Target, check_request
from dynatrain_megatron.transition.switch import SwitchReport, switch

__all__ = ["SwitchReport", "Target", "check_request", "switch"]
