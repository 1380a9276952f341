"""Pre-train a GPT or Hybrid model with Megatron, with or without changing its layout on the way.

    torchrun … -m dynatrain_megatron.plugin.pretrain_gpt MEGATRON FLAGS… [--dynatrain OVERRIDES…]

The wheel of megatron-core has the training loop but no script that uses it; this is one, for
models on text: Hybrid ones where ``--hybrid-layer-pattern`` is given, GPT ones otherwise. Without
``--dynatrain`` it is plain Megatron training. On a machine without CUDA the CPU platform is
installed and the flags that Megatron needs there are added.

Left to Megatron-LM's own scripts: fine-tuning, fill-in-the-middle data, distillation, hybrid
context parallelism, packed documents and in-process restart.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

from dynatrain_megatron.errors import HostMismatch
from dynatrain_megatron.platform import flags
from dynatrain_megatron.platform.versions import megatron_release, megatron_version
from dynatrain_megatron.plugin import entry

_STARTED = time.time()

_UPSTREAM = (
    "use Megatron-LM's own pretrain_gpt.py or pretrain_hybrid.py, which python -m "
    "dynatrain_megatron.launch runs"
)

# Features that this entry leaves out; each would need data or a loss of its own.
REFUSED: tuple[flags.RefusedFlag, ...] = tuple(
    flags.RefusedFlag(flag, lambda value: False, reason, _UPSTREAM)
    for flag, reason in (
        ("--sft", "fine-tuning data is packed"),
        ("--fim-data", "fill-in-the-middle data is not built here"),
        ("--logits-load-dir", "distillation has a loss of its own"),
        ("--logits-save-dir", "distillation has a loss of its own"),
        ("--hybrid-context-parallel", "its batches differ in length"),
        ("--dataloader-inter-document-masking", "its documents are packed"),
        ("--inprocess-restart", "it starts ranks again, and a layout change must own the ranks"),
        ("--perform-rl-step", "reinforcement learning has a loop of its own"),
    )
)


def main(argv: Sequence[str] | None = None) -> None:
    """Train; runs on every rank, with torchrun's environment variables.

    Mistakes in the flags and overrides end the process with one message and exit code 2, before a
    process group is made.
    """
    entry.start(sys.argv[1:] if argv is None else argv, REFUSED)
    if megatron_release() < (0, 18):
        too_old = f"this script needs megatron-core 0.18 or newer, and this is {megatron_version()}"
        entry.end(HostMismatch(f"{too_old}; {_UPSTREAM}"))
    _train()


def _train() -> None:
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, pretrain, set_startup_timestamps
    from megatron.training.arguments import parse_and_validate_args

    from dynatrain_megatron.plugin import gpt_steps

    set_startup_timestamps(program_start=_STARTED, main_entry=time.time())
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    model = _model_arguments(args)
    pretrain(
        cfg_container=argument_utils.pretrain_cfg_container_from_args(args, model.pop("config")),
        train_valid_test_dataset_provider=gpt_steps.datasets_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=gpt_steps.forward_step,
        get_embedding_ranks=gpt_steps.embedding_ranks,
        **model,
    )


def _model_arguments(args: Any) -> dict[str, Any]:
    """How ``pretrain`` learns of the model: a config from 0.19 on, a provider function before."""
    from megatron.training import argument_utils

    hybrid = args.hybrid_layer_pattern is not None
    if hasattr(argument_utils, "gpt_config_from_args"):
        make = "hybrid_config_from_args" if hybrid else "gpt_config_from_args"
        return {"config": getattr(argument_utils, make)(args)}
    if hybrid:
        raise HostMismatch("a Hybrid model (--hybrid-layer-pattern) needs megatron-core 0.19")
    from dynatrain_megatron.plugin.gpt_model import model_provider

    return {"config": None, "model_provider": model_provider}


if __name__ == "__main__":
    main()
