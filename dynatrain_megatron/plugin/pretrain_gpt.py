"""Pre-train a GPT or Hybrid model with Megatron, with or without changing its layout on the way.

    torchrun … -m dynatrain_megatron.plugin.pretrain_gpt MEGATRON FLAGS… [--dynatrain OVERRIDES…]

The wheel of megatron-core has the training loop but no script that uses it; this is one, for
models on text: Hybrid ones where ``--hybrid-layer-pattern`` is given, GPT ones otherwise. Without
``--dynatrain`` it is plain Megatron training. On a machine without CUDA the CPU platform is
installed and the flags that Megatron needs there are added.

Left to Megatron-LM's own scripts: fine-tuning, fill-in-the-middle data, distillation, hybrid
context parallelism, packed documents and in-process restart.
"""

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from dynatrain_megatron import platform
from dynatrain_megatron.config import (
    FLAG,
    DynaTrainConfig,
    asks_to_show,
    compose_shown,
    split_argv,
)
from dynatrain_megatron.errors import ConfigError, DynaTrainError, HostMismatch, PlatformError
from dynatrain_megatron.platform import flags
from dynatrain_megatron.presets import FLAG as CONFIG_DIR_FLAG
from dynatrain_megatron.presets import take_config_dir

_STARTED = time.time()

_USAGE = 2  # exit code for mistakes on the command line

_UPSTREAM = "use Megatron-LM's own pretrain_gpt.py or pretrain_hybrid.py for it"

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
    given = list(sys.argv[1:] if argv is None else argv)
    _speak_on_first_rank()
    try:
        config = prepare(given)
        if config is not None:
            from dynatrain_megatron.plugin import attach

            attach(config)
    except DynaTrainError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"{error}\n")
        usage = isinstance(error, ConfigError | PlatformError)
        raise SystemExit(_USAGE if usage else error.exit_code) from None
    _train()


def prepare(argv: Sequence[str]) -> DynaTrainConfig | None:
    """Read the overrides, install the platform and leave Megatron's flags in ``sys.argv``.

    With ``cfg=job`` among the overrides the first rank shows the configuration, and all end.

    Returns:
        The configuration behind ``--dynatrain``; None without the flag.

    Raises:
        ConfigError: for a wrong override.
        PlatformError: for a flag that cannot work here.
        HostMismatch: for a Megatron or torch in which a name to be replaced is missing.
    """
    rest, config_dir = take_config_dir(argv)
    host_argv, overrides = split_argv(rest)
    if overrides is None and config_dir is not None:
        raise ConfigError(f"{CONFIG_DIR_FLAG} needs {FLAG}, whose presets it adds to")
    composed = None if overrides is None else compose_shown(overrides, config_dir)
    if composed is not None and asks_to_show(overrides or ()):
        if os.environ.get("RANK", "0") == "0":
            print(composed.text, end="")
        raise SystemExit(0)
    config = None if composed is None else composed.config
    flags.refuse(host_argv, REFUSED, "in this entry")
    chosen = platform.install("auto" if config is None else config.platform)
    host_argv += chosen.default_flags(host_argv)
    sys.argv = [sys.argv[0], *host_argv, *flags.local_stack(host_argv)]
    return config


def _train() -> None:
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, pretrain, set_startup_timestamps
    from megatron.training.arguments import parse_and_validate_args

    from dynatrain_megatron.plugin import gpt_steps

    set_startup_timestamps(program_start=_STARTED, main_entry=time.time())
    args = parse_and_validate_args(
        extra_args_provider=_add_help, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
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


class _PlainHelp(argparse.HelpFormatter):
    """Shows a help text as it is where argparse cannot fill it in."""

    def _expand_help(self, action: argparse.Action) -> str:
        # Some help texts of Megatron have a bare per cent sign, which ends --help with an error.
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


def _add_help(parser: Any) -> Any:
    """Show the flag in Megatron's --help; it was taken out of the arguments before."""
    parser.formatter_class = _PlainHelp
    group = parser.add_argument_group(title="dynatrain")
    group.add_argument(
        FLAG,
        nargs="*",
        metavar="OVERRIDE",
        default=argparse.SUPPRESS,
        help="change the parallel layout while training; Hydra overrides follow, for example "
        "schedule=[{iteration: 50, layout: {tp: 1, pp: 2}}]; with cfg=job they are shown as one "
        "configuration, and nothing is run",
    )
    group.add_argument(
        CONFIG_DIR_FLAG,
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="folder with presets of your own for --dynatrain, such as topology/NAME.yaml",
    )
    return parser


def _speak_on_first_rank() -> None:
    """Show what the package logs on the first rank, on the others warnings of the package only."""
    first = os.environ.get("RANK", "0") == "0"
    package = logging.getLogger("dynatrain_megatron")
    if not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[dynatrain] %(message)s"))
        package.addHandler(handler)
        package.propagate = False
    package.setLevel(logging.INFO if first else logging.WARNING)
    if not first:
        # Megatron warns of each library that it does not find, on every rank.
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=r"megatron\.")


if __name__ == "__main__":
    main()
