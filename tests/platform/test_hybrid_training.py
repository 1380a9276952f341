"""Hybrid models of Megatron's local modules train as GPT models of the same layers do."""

from pathlib import Path

import pytest

from tests.host import around
from tests.platform.test_training import failure
from tests.ranks import TINY_LLAMA, run_megatron

# Weights begin ten times larger than Megatron has them, so that attention matters in the loss.
FLAGS = [*TINY_LLAMA, "--use-distributed-optimizer", "--init-method-std", "0.2"]
MOE = "--num-experts 4 --moe-router-topk 2 --moe-router-dtype fp32 --moe-layer-freq [0,1,0,1]"


@pytest.mark.host
@pytest.mark.parametrize(
    ("world", "pattern", "gpt", "both"),
    [
        (1, "*-*-*-*-", "", ""),
        (1, "*-*E*-*E", MOE, ""),
        (
            2,
            "*-*-|*-*-/*-",
            "--mtp-num-layers 1",
            "--pipeline-model-parallel-size 2 --normalization LayerNorm",
        ),
        (
            2,
            "+-+-+-+-",
            "",
            "--tensor-model-parallel-size 2 --sequence-parallel --multi-latent-attention"
            " --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16"
            " --qk-pos-emb-head-dim 8 --v-head-dim 12",
        ),
    ],
    ids=["dense", "experts", "pipeline and prediction", "latent"],
)
def test_layers_train_as_those_of_a_gpt_model(
    world: int, pattern: str, gpt: str, both: str, tmp_path: Path
) -> None:
    """Bit for bit: half layers of the one are drawn and computed as the halves of the other."""
    grouped = FLAGS.index("--group-query-attention")
    latent = "--multi-latent-attention" in both
    common = [*FLAGS[:grouped], *FLAGS[grouped + 3 :]] if latent else FLAGS
    common = [*common, *both.split(), "--data-cache-path", str(tmp_path / "cache")]
    experts = gpt.rpartition(" --moe-layer-freq")[0] if gpt == MOE else ""
    run_megatron(world, [*common, *gpt.split()], [], tmp_path / "gpt")
    run = run_megatron(
        world,
        [*common, *experts.split(), f"--hybrid-layer-pattern={pattern}"],
        [],
        tmp_path / "hybrid",
    )
    assert "added --spec dynatrain_megatron.platform.hybrid_stack" in run.logs[0]
    expected, got = around.steps(tmp_path / "gpt"), around.steps(tmp_path / "hybrid")
    assert len(got) == 4 and got == expected
    assert len({step["loss"] for step in got}) == 4


@pytest.mark.host
def test_layers_that_need_cuda_are_refused(tmp_path: Path) -> None:
    text = failure([*FLAGS, "--hybrid-layer-pattern", "M-*-"], tmp_path)
    assert "--hybrid-layer-pattern M-*- cannot work on the CPU platform" in text
    assert "use *, +, - and E layers" in text


@pytest.mark.host
def test_a_checkpoint_has_the_names_of_megatrons_own_layers(tmp_path: Path) -> None:
    """Those that Transformer Engine gives the norms which it fuses into projections."""
    from torch.distributed.checkpoint import FileSystemReader

    save = f"--save {tmp_path}/saved --save-interval 1 --ckpt-format torch_dist --train-iters 1"
    run_megatron(1, [*FLAGS, "--hybrid-layer-pattern", "*-", *save.split()], None, tmp_path)
    reader = FileSystemReader(tmp_path / "saved" / "iter_0000001")
    names = {name for name in reader.read_metadata().state_dict_metadata if "norm" in name}
    assert {name for name in names if not name.startswith("optimizer")} == {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.final_norm.weight",
    }
