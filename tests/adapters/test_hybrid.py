"""The pattern of a Hybrid model for a layout: where the pipeline cuts it."""

import pytest

from dynatrain_megatron.adapters.hybrid import pattern_of
from dynatrain_megatron.errors import LayoutError
from dynatrain_megatron.layout import ParallelLayout

LAUNCH = "*-|*E*E*-/*-/*-"  # 2 and 6 layers, 2 predictions


def pattern(layout: str, launch: str = LAUNCH, pp: int = 2, *, host_cuts: bool = False) -> str:
    return pattern_of(ParallelLayout.parse(layout), launch, pp, host_cuts=host_cuts)


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        ("pp2", LAUNCH),
        ("tp2-pp2-dp3", LAUNCH),
        ("dp2", "*-*E*E*-/*-/*-"),
        ("pp4", "*-|*E|*E|*-/*-/*-"),
        ("pp2-vpp2", "*-|*E|*E|*-/*-/*-"),
        ("pp2-pipeline:*-*E*|E*-", "*-*E*|E*-/*-/*-"),
        ("pp2-pipeline:*-*|E*E*-/*-/*-", "*-*|E*E*-/*-/*-"),
        ("pp2-vpp2-pipeline:*|-*E|*E*|-", "*|-*E|*E*|-/*-/*-"),
    ],
)
def test_the_launch_pattern_or_the_one_asked_for_or_equal_stages(layout: str, wanted: str) -> None:
    assert pattern(layout) == wanted


def test_a_launch_with_virtual_stages_or_without_cuts_is_known_again() -> None:
    assert pattern("pp2-vpp2", "*|-*|-|*-*") == "*|-*|-|*-*"
    assert pattern("pp2", "*|-*|-|*-*-") == "*-*-|*-*-"
    assert pattern("pp2", "*-*-") == "*-*-"  # Megatron cuts it by itself
    assert pattern("dp2", "*-*-", 1) == "*-*-"


def test_cuts_by_flags_are_left_to_megatron() -> None:
    assert pattern("pp3", "*-*-", host_cuts=True) == "*-*-"
    assert pattern("pp2", "*-*-", host_cuts=True) == "*-*-"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("pp3", r"pp\*vpp=3\*1=3 must divide the 8 layers .*\*-\*E\*E\*-; .*'\*-\*\|E\*E\*-'"),
        ("pp2-vpp3", r"pp\*vpp=2\*3=6 must divide the 8 layers"),
        ("pp2-pipeline:*-*-|*E*-", r"has the layers \*-\*-\*E\*-, but the model has \*-\*E\*E\*-"),
        ("pp2-pipeline:*-*E|*E*-/*-", r"has the predictions \*-, but the model has \*-/\*-"),
        ("pp2-pipeline:*-*E|*E*-/", r"has the predictions none, but the model has \*-/\*-"),
        ("pp2-pipeline:*-|*E|*E|*-", r"makes 4 stages, but pp\*vpp=2\*1=2"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(layout: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        pattern(layout)
