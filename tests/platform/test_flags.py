"""Megatron's flags on the CPU platform, as text."""

import pytest

from dynatrain_megatron.errors import PlatformError
from dynatrain_megatron.platform.flags import CPU_DEFAULTS, cpu_defaults, local_stack, value_of


def test_what_is_missing_is_added_and_what_is_given_stays() -> None:
    added = cpu_defaults(["--num-layers", "2"])
    assert added == [word for default in CPU_DEFAULTS for word in default.words()]
    given = ["--distributed-backend=gloo", "--transformer-impl", "local", "--no-rope-fusion"]
    left = cpu_defaults(given)
    assert not {"--distributed-backend", "--transformer-impl", "--no-rope-fusion"} & set(left)
    assert "--no-persist-layer-norm" in left


def test_each_added_flag_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "dynatrain_megatron"):
        cpu_defaults([])
    assert "added --distributed-backend gloo: NCCL joins GPUs only" in caplog.messages
    assert len(caplog.messages) == len(CPU_DEFAULTS)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--distributed-backend nccl", ("--distributed-backend nccl", "NCCL", "use gloo")),
        ("--distributed-backend=nccl", ("--distributed-backend nccl", "use gloo")),
        ("--transformer-impl transformer_engine", ("transformer_engine", "use local")),
        (
            "--context-parallel-size 2 --window-size 8,0",
            ("--window-size 8,0", "tensor or pipeline"),
        ),
        (
            "--context-parallel-size 2 --cp-comm-type a2a",
            ("--cp-comm-type a2a", "leave it out"),
        ),
        ("--hierarchical-context-parallel-sizes 2 2", ("--hierarchical-context-parallel-sizes",)),
        ("--fp8-format hybrid", ("--fp8-format hybrid", "Transformer Engine")),
        ("--use-precision-aware-optimizer --lr 1", ("--use-precision-aware-optimizer cannot",)),
        ("--moe-token-dispatcher-type flex", ("flex", "alltoall")),
        ("--cuda-graph-impl local", ("--cuda-graph-impl local", "CUDA graphs")),
        ("--hybrid-layer-pattern *-M-", ("--hybrid-layer-pattern *-M-", "Mamba (M)", "E layers")),
        ("--hybrid-override-pattern=G*", ("--hybrid-override-pattern G*", "E layers")),
        ("--profile --lr 1", ("--profile cannot", "--use-pytorch-profiler")),
    ],
)
def test_what_cannot_work_is_refused_by_name(argv: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(PlatformError) as caught:
        cpu_defaults(argv.split())
    for part in (*parts, "on the CPU platform"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        "--context-parallel-size 1 --window-size 8,0 --cp-comm-type a2a --cuda-graph-impl none",
        "--context-parallel-size 2 --cp-comm-type allgather --multi-latent-attention",
        "--window-size 8,0 --cpu-offloading-num-layers 0",
        "--moe-token-dispatcher-type alltoall --profile --use-pytorch-profiler",
    ],
)
def test_values_that_work_pass(argv: str) -> None:
    assert cpu_defaults(argv.split())


def test_a_hybrid_model_gets_local_layers_where_it_has_no_others() -> None:
    hybrid = ["--hybrid-layer-pattern=-*", "--transformer-impl", "local"]
    module = "dynatrain_megatron.platform.hybrid_stack"
    assert local_stack(hybrid) == ["--spec", module, "stack"]
    normed = [*hybrid, "--qk-layernorm"]
    assert local_stack(normed) == ["--spec", module, "stack_with_latent_norms"]
    assert local_stack([*hybrid, "--spec", "my.stack", "name"]) == []
    assert local_stack([*hybrid[:1], "--transformer-impl", "transformer_engine"]) == []
    assert local_stack(hybrid[1:]) == local_stack(hybrid[:1]) == []


def test_the_last_value_counts() -> None:
    argv = ["--a", "1", "--b", "--c", "--a=2"]
    assert value_of(argv, "--a") == "2"
    assert value_of(argv, "--b") == ""
    assert value_of(argv, "--d") is None
