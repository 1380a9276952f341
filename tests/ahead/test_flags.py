"""What a job's flags say is what Megatron makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.ahead.flags import read_flags
from dynatrain_megatron.errors import ConfigError, LayoutError
from tests.shapes.test_rosters import CASES


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_that_of_a_real_job(name: str) -> None:
    """The rosters of these models are held against the jobs' own objects elsewhere."""
    assert read_flags(CASES[name].flags, 1).model == CASES[name].model


@pytest.mark.parametrize(
    ("flags", "world", "text"),
    [
        ("", 8, "dp8-noopt"),
        ("--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel", 8,
         "tp2-dp4-sp"),
        ("--use-distributed-optimizer --pipeline-model-parallel-size=2 "
         "--num-layers-per-virtual-pipeline-stage 2 --use-tp-pp-dp-mapping", 4,
         "pp2-vpp2-dp2-order:tp.cp.ep.pp.dp"),
        ("--use-distributed-optimizer --num-virtual-stages-per-pipeline-rank 4 "
         "--pipeline-model-parallel-size 2 --micro-batch-size 3", 2, "pp2-vpp4-mbs3"),
        ("--use-distributed-optimizer --expert-model-parallel-size 4 --context-parallel-size 2", 8,
         "cp2-dp4-ep4"),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", 4,
         "dp4-instances2"),
    ],
)  # fmt: skip
def test_the_layout(flags: str, world: int, text: str) -> None:
    model = [flag for flag in CASES["experts"].flags if flag != "--use-distributed-optimizer"]
    assert str(read_flags([*model, *flags.split()], world).layout) == text


FLAGS = st.sampled_from(
    ["--num-layers", "--hidden-size", "--num-experts", "--swiglu", "--vocab-size", "--kv-channels",
     "--moe-layer-freq", "--multi-latent-attention", "--tensor-model-parallel-size", "--nothing",
     "--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-size", "0", "7", "64",
     "-1", "x", "([0]*2+[1]*6)", "9" * 400, "٣", "--group-query-attention", "--num-query-groups"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(FLAGS, max_size=8), st.sampled_from([1, 6, 8]))
def test_any_flags_are_read_or_refused(flags: list[str], world: int) -> None:
    for given_ in (flags, [*CASES["dense"].flags, *flags]):
        try:
            read_flags(given_, world)
        except (ConfigError, LayoutError) as error:
            assert 0 < len(str(error)) < 600
