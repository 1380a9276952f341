"""List the layouts that a model can be trained in on so many GPUs, best first.

The model is a preset, or what a job's own Megatron flags say, given after --:

    dynatrain layouts --gpus 64 --memory 80GiB --model 70B
    dynatrain layouts --gpus 12 --memory 80GiB -- --num-layers 32 --hidden-size 4096 …

Memory is that of the fullest rank: parameters, gradients and optimizer exact, activations
estimated. The score is a rough prediction of a step's time, relative to the best layout's. See
docs/layouts.md for the formulas. Exit code 1: no layout is possible, or none fits.
"""

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial

from rich.console import Console
from rich.table import Table

from dynatrain_megatron.advisor import (
    Advice,
    Advised,
    Machine,
    Recompute,
    Workload,
    advise,
    layout_options,
    read_flags,
    workload_of,
)
from dynatrain_megatron.cli.numbers import count
from dynatrain_megatron.errors import ConfigError, DynaTrainError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.shapes import MODELS

SUMMARY = "list the layouts a model can be trained in on so many GPUs, best first"

MOST_GPUS = 1 << 17
_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_GIB = 1 << 30
_PARTS = ("weights", "grads", "optimizer", "activations")
_ROOMY = 120  # columns of a terminal from which on there is room for the parts of memory
_SHOWN = 0.005  # of a step; what is below in all layouts has no column
_WAITS = ("bubble", "tp", "cp", "ep", "pp", "dp")


class NoLayout(DynaTrainError):
    """There is no layout to show."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: the workload, the layout options it is launched with, GPUs."""

    workload: Workload
    base: ParallelLayout
    world: int
    machine: Machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain layouts`."""
    parser.add_argument(
        "--gpus",
        type=partial(count, most=MOST_GPUS),
        required=True,
        metavar="N",
        help="number of GPUs, one for each rank",
    )
    parser.add_argument(
        "--memory",
        type=_memory,
        metavar="SIZE",
        help="memory of a GPU, such as 80GiB; without it layouts of any size are listed",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=count,
        metavar="N",
        help="tensor parallel groups stay within a node (default: 8, or --gpus if fewer)",
    )
    parser.add_argument(
        "--model", choices=MODELS, metavar="NAME", help=f"one of {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--seq-length", type=count, metavar="N", help="tokens of a sample (default: 4096)"
    )
    parser.add_argument(
        "--global-batch-size",
        type=count,
        metavar="N",
        help="samples of a step (default: about 4 million tokens, whatever the layout)",
    )
    parser.add_argument(
        "--micro-batch-size", type=count, metavar="N", help="samples at a time (default: 1)"
    )
    parser.add_argument(
        "--recompute",
        choices=[str(choice) for choice in Recompute],
        help="what of the forward pass is computed again (default: none)",
    )
    parser.add_argument(
        "--top", type=count, default=10, metavar="K", help="how many to list (default: 10)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "flags", nargs="*", metavar="-- FLAGS", help="the job's Megatron flags, instead of --model"
    )


def run(args: argparse.Namespace) -> int:
    """Print the best layouts; 1 where there are none."""
    asked = read_question(args)
    found = advise(asked.workload, asked.world, asked.machine, base=asked.base)
    if not found.fitting:
        raise NoLayout(_why_none(asked, found))
    if args.json:
        print(json.dumps(as_json(asked, found, args.top), indent=2))
    else:
        print_table(
            Console() if sys.stdout.isatty() else Console(width=160), asked, found, args.top
        )
    return 0


def read_question(args: argparse.Namespace) -> Question:
    """What the options and flags ask for; raises ConfigError where they contradict each other."""
    if (args.model is None) == (not args.flags):
        given = "both" if args.flags else "neither"
        raise ConfigError(
            f"name the model by --model or by the job's Megatron flags after --; got {given}"
        )
    if args.model is not None:
        workload, base = Workload(model=MODELS[args.model]), ParallelLayout()
    else:
        flags = read_flags(args.flags)
        workload, base = workload_of(flags), layout_options(flags)
    if args.seq_length is not None:
        workload = replace(workload, seq_length=args.seq_length)
    if args.global_batch_size is not None:
        workload = replace(workload, global_batch_size=args.global_batch_size)
    if args.recompute is not None:
        workload = replace(workload, recompute=Recompute(args.recompute))
    if args.micro_batch_size is not None:
        base = replace(base, mbs=args.micro_batch_size)
    per_node = args.gpus_per_node or min(Machine().gpus_per_node, args.gpus)
    machine = Machine(memory_bytes=args.memory, gpus_per_node=per_node)
    return Question(workload, base, args.gpus, machine)


def as_json(asked: Question, found: Advised, top: int) -> dict[str, object]:
    """The answer for programs: bytes and predicted seconds."""
    workload = asked.workload
    return {
        "gpus": asked.world,
        "machine": asdict(asked.machine),
        "usable_bytes": asked.machine.usable_bytes,
        "parameters": workload.model.numel,
        "seq_length": workload.seq_length,
        "global_batch_size": workload.global_batch_size,
        "recompute": str(workload.recompute),
        "num_fitting": len(found.fitting),
        "num_too_large": len(found.too_large),
        "layouts": [_advice_json(one) for one in found.fitting[:top]],
    }


def _advice_json(one: Advice) -> dict[str, object]:
    return {
        "layout": str(one.layout),
        "degrees": asdict(one.layout),
        "num_microbatches": one.num_microbatches,
        "memory_bytes": {**asdict(one.memory), "total": one.memory.total},
        "predicted_s": {**asdict(one.step), "total": one.step.total},
        "score": one.score,
    }


def print_table(console: Console, asked: Question, found: Advised, top: int) -> None:
    """The answer for people."""
    workload, machine = asked.workload, asked.machine
    batch = workload.global_batch_size or "about 4 Mi tokens"
    limit = "" if machine.usable_bytes is None else f", {_gib(machine.usable_bytes)} GiB usable"
    console.print(
        f"{workload.model.numel / 1e9:.1f}B parameters on {asked.world} GPUs, "
        f"{machine.gpus_per_node} a node{limit}; sequences of {workload.seq_length}, "
        f"global batch {batch}, recompute {workload.recompute}",
        soft_wrap=True,
        highlight=False,
    )
    shown = found.fitting[:top]
    waits = [name for name in _WAITS if any(_share(one, name) >= _SHOWN for one in shown)]
    table = Table(box=None, pad_edge=False)
    parts = _PARTS if console.width >= _ROOMY else ()
    table.add_column("layout", overflow="fold", min_width=20)
    for name in ("µbatches", "GiB", *parts, "score", *waits):
        table.add_column(name, justify="right", no_wrap=True)
    for one in shown:
        memory = one.memory
        table.add_row(
            str(one.layout),
            str(one.num_microbatches),
            _gib(memory.total),
            *(_gib(getattr(memory, part)) for part in parts),
            f"{one.score / shown[0].score:.2f}",
            *(f"{_share(one, name):.0%}" for name in waits),
        )
    console.print(table, highlight=False)
    rest = f", {len(found.too_large)} do not" if found.too_large else ""
    console.print(f"{len(found.fitting)} layouts fit{rest}.", highlight=False)


def _share(one: Advice, name: str) -> float:
    """The part of a step's predicted time that is spent so."""
    return float(getattr(one.step, name)) / one.step.total


def _why_none(asked: Question, found: Advised) -> str:
    if not found.too_large:
        return (
            f"no layout of {asked.world} ranks divides the model and its batch "
            f"({_sizes(asked)}); try another number of GPUs, of which the batch is a multiple"
        )
    least = found.too_large[0]
    assert asked.machine.usable_bytes is not None
    return (
        f"none of {len(found.too_large)} layouts of {asked.world} ranks fits: the least is "
        f"{_gib(least.memory.total)} GiB ({least.layout}), usable are "
        f"{_gib(asked.machine.usable_bytes)} GiB of a GPU; use more GPUs or --recompute full"
    )


def _sizes(asked: Question) -> str:
    """The sizes that degrees have to divide."""
    shape, base = asked.workload.shape, asked.base
    found = {
        "layers": shape.num_layers,
        "heads": shape.num_heads,
        "vocabulary": shape.padded_vocab_size,
        "experts": shape.num_experts,
        "global batch": shape.global_batch_size,
        "micro-batch": base.mbs,
        "GPUs a node": asked.machine.gpus_per_node,
    }
    return ", ".join(f"{name} {size}" for name, size in found.items() if size is not None)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.1f}"


def _memory(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([a-zA-Z]+)", text)
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r:.100} is not a size; write a number and a unit, such as 80GiB"
        )
    return size
