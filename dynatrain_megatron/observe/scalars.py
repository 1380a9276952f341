"""What TensorBoard and Weights & Biases show of layouts and switches, by tag."""

from collections.abc import Mapping

from dynatrain_megatron.layout import ParallelLayout

ROOM = "dynatrain"
LAYOUT = f"{ROOM}/layout"
"""The tag of the layout as text."""


def of_layout(layout: ParallelLayout) -> dict[str, float]:
    """The layout's degrees and its number of ranks as numbers."""
    degrees = {
        "tp": layout.tp,
        "pp": layout.pp,
        "vpp": layout.vpp or 1,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.expert_tp,
        "dp": layout.dp,
        "world": layout.world,
    }
    return {f"{ROOM}/{axis}": float(degree) for axis, degree in degrees.items()}


def of_switch(
    seconds: Mapping[str, float], sizes: Mapping[str, int], peak_extra_bytes: int, stall_s: float
) -> dict[str, float]:
    """One switch: its stall, the seconds of each phase, bytes moved and the most memory taken.

    ``sizes`` are its bytes by kind, as in events.jsonl.
    """
    return {
        f"{ROOM}/stall_s": stall_s,
        **{f"{ROOM}/{phase}_s": value for phase, value in seconds.items()},
        f"{ROOM}/bytes_moved": float(sizes["moved"]),
        f"{ROOM}/bytes_lower_bound": float(sizes["lower_bound"]),
        f"{ROOM}/peak_extra_bytes": float(peak_extra_bytes),
    }
