"""Rank ↔ coordinate, by itself and against Megatron's own rank generator."""

import itertools
import json
import subprocess
import sys
from collections import defaultdict

import pytest
from hypothesis import given

from dynatrain_megatron.errors import LayoutError
from dynatrain_megatron.layout import ParallelLayout
from tests.layout.strategies import parallel_layouts

DENSE, EXPERT = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
HOST_NAMES = {"etp": "tp", "edp": "dp"}

# Run apart, so that Megatron is not imported into the test process before a platform is.
HOST_SCRIPT = """
import json, sys
from megatron.core.parallel_state import RankGenerator
answers = []
for case in json.load(sys.stdin):
    generator = RankGenerator(**case["degrees"], order=case["order"])
    answers.append({token: generator.get_ranks(token) for token in case["tokens"]})
json.dump(answers, sys.stdout)
"""

LAYOUTS = [
    ParallelLayout.parse(text)
    for text in (
        "dp1",
        "tp2-pp2-dp2",
        "tp2-pp2-cp2-dp3",
        "tp2-pp3-cp2-dp4-ep4",
        "tp4-pp2-dp4-ep4-etp2",
        "tp4-cp2-dp2-ep8-etp1",
        "tp2-dp6-ep3-sp",
        "tp2-pp2-dp2-order:tp.cp.ep.pp.dp",
        "tp2-pp2-cp2-dp2-ep2-order:tp.pp.dp.cp.ep",
        "tp2-pp2-cp2-dp2-order:dp.cp.ep.tp.pp",
        "tp2-pp2-dp4-ep2-order:ep.dp.tp.cp.pp",
        "pp2-cp2-dp2-ep2-order:tp.cp.ep.pp.dp",
        "tp3-pp2-cp2-dp2-ep2-order:pp.dp.ep.cp.tp",
    )
]


@given(parallel_layouts())
def test_each_grid_counts_all_ranks_with_the_first_axis_of_the_order_fastest(
    layout: ParallelLayout,
) -> None:
    sizes = {
        "tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp,
        "etp": layout.expert_tp, "ep": layout.ep, "edp": layout.expert_dp,
    }  # fmt: skip
    coordinates = [layout.coordinate(rank) for rank in range(layout.world)]
    assert set(coordinates[0]) == set(sizes)
    for axes in (DENSE, EXPERT):
        named = {HOST_NAMES.get(axis, axis): axis for axis in axes}
        order = [named[name] for name in reversed(layout.order.split("-")) if name in named]
        wanted = list(itertools.product(*(range(sizes[axis]) for axis in order)))
        assert [tuple(at[axis] for axis in order) for at in coordinates] == wanted


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=rf"rank={rank} .* world=8"):
        ParallelLayout(tp=2, pp=2, dp=2).coordinate(rank)


def groups(
    layout: ParallelLayout, axes: tuple[str, ...], varied: tuple[str, ...]
) -> list[list[int]]:
    """The rank groups in which only the ``varied`` axes of one grid differ."""
    found = defaultdict(list)
    for rank in range(layout.world):
        coordinate = layout.coordinate(rank)
        found[tuple(coordinate[axis] for axis in axes if axis not in varied)].append(rank)
    return sorted(found.values())


@pytest.mark.host
def test_groups_are_those_of_megatrons_rank_generator() -> None:
    dense = [("tp",), ("cp",), ("dp",), ("pp",), ("tp", "pp"), ("cp", "dp"), ("tp", "cp", "dp")]
    expert = [("etp",), ("ep",), ("edp",), ("pp",), ("etp", "ep"), ("etp", "ep", "pp")]
    cases, wanted = [], []
    for layout in LAYOUTS:
        sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp, "ep": 1}
        experts = {
            "tp": layout.expert_tp, "ep": layout.ep, "dp": layout.expert_dp, "pp": layout.pp,
            "cp": 1,
        }  # fmt: skip
        for degrees, axes, sets in ((sizes, DENSE, dense), (experts, EXPERT, expert)):
            tokens = {
                "-".join(HOST_NAMES.get(axis, axis) for axis in varied): varied for varied in sets
            }
            cases.append({"degrees": degrees, "order": layout.order, "tokens": list(tokens)})
            wanted.append({token: groups(layout, axes, varied) for token, varied in tokens.items()})
    run = subprocess.run(
        [sys.executable, "-c", HOST_SCRIPT],
        input=json.dumps(cases), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    answers = json.loads(run.stdout)
    for case, ours, theirs in zip(cases, wanted, answers, strict=True):
        for token in case["tokens"]:
            # Megatron lists ranks along a group in the group's own order; the sets must be equal.
            assert ours[token] == sorted(sorted(group) for group in theirs[token]), (case, token)
