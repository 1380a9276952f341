"""Let a switch run on a topology, event by event, and say how long it takes.

    dynatrain simulate model=llama2_70b source=tp8-pp4-dp4 target=tp4-pp8-dp4 topology=a800
    dynatrain simulate --paper topology=a800

All messages of the plan travel on the links of the topology: ranks of a node share its ways out,
messages on one link share its rate, and a rank has the messages of two windows under way. With
--paper the published set-ups are run, and their published seconds stand beside ours. The links are
printed, and how much of their rate is taken to be reached. docs/plan.md says what is left out.
"""

import argparse
import json
from typing import TYPE_CHECKING, Any

from dynatrain_megatron.cli.ahead_options import add_case_arguments, compose_on
from dynatrain_megatron.errors import ConfigError

if TYPE_CHECKING:
    from dynatrain_megatron.ahead.estimate import Estimate
    from dynatrain_megatron.ahead.paper import PaperCase

SUMMARY = "let a switch run on a topology, and say how long it takes"
_PAPER_TOPOLOGY = "topology=a800"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain simulate`."""
    add_case_arguments(parser)
    parser.add_argument(
        "--paper",
        action="store_true",
        help="run the published set-ups (16 hosts of 8 A800) and show the published seconds beside",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate every switch that was asked for, or the paper's."""
    from dynatrain_megatron.ahead.cases import Case, Impossible, read_cases
    from dynatrain_megatron.ahead.estimate import estimate
    from dynatrain_megatron.ahead.text import impossible_lines, seconds_lines, topology_text
    from dynatrain_megatron.config import asks_to_show

    overrides, flags = args.overrides, args.flags
    if args.paper:
        return _run_paper(overrides, flags, args)
    composed = compose_on(overrides, args.dynatrain_config_dir)
    if asks_to_show(overrides):
        print(composed.text, end="")
        return 0
    cases = read_cases(composed.config, flags, world=args.world, weights_only=args.weights_only)
    results: list[dict[str, object]] = []
    for case in cases:
        if isinstance(case, Impossible):
            results.append({"feasible": False, "target": case.target, "reason": case.reason})
            lines = impossible_lines(case)
        else:
            found = estimate(case, efficiency=args.efficiency)
            results.append(found.as_json())
            lines = [f"{case.source} → {case.target}", *seconds_lines(found)]
            lines.append(f"on         {topology_text(found)}")
        if not args.json:
            print("\n".join(lines))
    if args.json:
        print(json.dumps(results, indent=2))
    return 0 if all(isinstance(case, Case) for case in cases) else 1


def _run_paper(overrides: list[str], flags: list[str], args: argparse.Namespace) -> int:
    from dynatrain_megatron.ahead.paper import CASES

    if flags:
        raise ConfigError("--paper has models and layouts of its own; leave out what follows --")
    config = compose_on(overrides, args.dynatrain_config_dir, _PAPER_TOPOLOGY).config
    if config.model is not None or config.source != "auto" or config.steps():
        raise ConfigError("--paper has models and layouts of its own; leave out all but topology")
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(CASES):
        found = _of_paper(case, overrides, args)
        rows.append(_row(case, found))
        if not args.json:
            if not number:
                print("\n".join(_head(found)))
            print(_line(rows[-1]), flush=True)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print(
            "Seconds are of wire and of rebuilding bf16 parameters. Published: 70B under 2 s, 235B "
            "4.36 s;\nneither its layouts nor its links are, so the layouts here are ours."
        )
    return 0


def _of_paper(case: "PaperCase", overrides: list[str], args: argparse.Namespace) -> "Estimate":
    from dynatrain_megatron.ahead.cases import Case, read_cases
    from dynatrain_megatron.ahead.estimate import estimate

    own = [f"model={case.model}", f"source={case.source}", f"target={case.target}"]
    config = compose_on([*overrides, *own], args.dynatrain_config_dir, _PAPER_TOPOLOGY).config
    (read,) = read_cases(config, weights_only=args.weights_only)
    assert isinstance(read, Case)
    return estimate(read, efficiency=args.efficiency)


def _row(case: "PaperCase", found: "Estimate") -> dict[str, Any]:
    return {
        "case": case.name,
        "published_s": case.seconds,
        "share_of_published": None if case.seconds is None else found.seconds / case.seconds,
        **found.as_json(),
    }


def _head(found: "Estimate") -> list[str]:
    from dynatrain_megatron.ahead.text import topology_text

    columns = f"{'wire':>8s} {'rebuild':>8s} {'together':>9s} {'published':>10s} {'share':>7s}"
    # How many nodes there are differs from case to case.
    links = topology_text(found).partition("; ")[2]
    return [f"Links: {links}", f"{'model':>5s} {'ranks':>5s}  {'transition':56s} {columns}"]


def _line(row: dict[str, Any]) -> str:
    wire, rebuilt = sum(row["simulated_s"]["wire"]), row["simulated_s"]["rebuild"]
    published, share = row["published_s"], row["share_of_published"]
    beside = "         –       –" if published is None else f"{published:9.2f}s {share:7.0%}"
    way = f"{row['source']} → {row['target']}"
    return (
        f"{row['case']:>5s} {row['ranks']['source']:5d}  {way:56s} {wire:7.3f}s {rebuilt:7.3f}s "
        f"{wire + rebuilt:8.3f}s {beside}"
    )
