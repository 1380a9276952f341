"""Random switches of real Megatron jobs on four CPU ranks, one in ten made to fail on purpose.

Each family of models is one run that switches after every step, with fingerprints compared. Every
switch that is done is held against Megatron's own checkpoint (:mod:`tests.host.oracle`): saved in
the layout before, loaded in the one after, each tensor bit for bit. After every one that is called
off the job must be in the layout it was in, with the same bits. Schedules, windows and whether the
old state is kept are drawn for each switch; each family has its own transport and staging memory.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dynatrain_megatron import faults
from dynatrain_megatron.config import EngineSchedule, KeepSource
from dynatrain_megatron.faults import Fault, Kind, Phase
from tests.host import around, oracle
from tests.host.test_families import DEEPSEEK, LATENT, MOE, WIDE, without
from tests.ranks import TINY_LLAMA, run_megatron

RANKS = 4
FIRST = 2
PHASES = [phase for phase in Phase if phase is not Phase.commit]  # which is after the decision
KINDS = [Kind.exception, Kind.bitflip, Kind.oom]


class Family(NamedTuple):
    """Flags of a model, layouts of it, of which the first is the launch's, and how it moves."""

    flags: list[str]
    launch: list[str]
    layouts: tuple[str, ...]
    engine: tuple[str, ...]


FAMILIES = {
    "dense": Family(
        [*TINY_LLAMA, "--bf16"],
        ["--tensor-model-parallel-size", "2"],
        (
            *("tp2-dp2", "dp4", "tp4", "pp4", "pp2-dp2", "tp2-pp2", "tp2-dp2-sp", "tp4-sp"),
            *("pp2-vpp2-dp2", "tp2-pp2-sp", "cp2-dp2", "cp4", "tp2-cp2", "pp2-cp2", "dp4-mbs2"),
            *("dp4-instances2", "pp2-dp2-order:tp.cp.ep.pp.dp", "pp4-pipeline:E|tt|tt|L"),
        ),
        ("engine.transport=vm", "engine.staging_mib=1"),
    ),
    "mixture of experts": Family(
        [*TINY_LLAMA, *MOE],
        ["--expert-model-parallel-size", "4"],
        (
            *("dp4-ep4", "dp4", "dp4-ep2", "tp2-dp2-ep2-etp1-sp", "pp2-vpp2-dp2", "tp4-sp"),
            *("tp2-pp2-ep2-etp1-sp", "pp2-dp2-ep2", "pp4", "tp2-dp2-sp", "cp2-dp2-ep2"),
        ),
        ("engine.transport=memfd", "engine.staging_mib=2"),
    ),
    "latent attention": Family(
        [*LATENT, *WIDE, *MOE, *DEEPSEEK],
        ["--expert-model-parallel-size", "4"],
        (
            *("dp4-ep4", "dp4", "dp4-ep2", "tp2-dp2-ep2-etp1-sp", "pp2-dp2-ep2", "cp2-dp2-ep2"),
            *("tp2-pp2-ep2-etp1-sp", "tp4-sp", "cp4-ep4"),
        ),
        ("engine.transport=torch", "engine.staging_mib=1"),
    ),
    "hybrid": Family(
        [*without(TINY_LLAMA, "--num-layers", 2), "--hybrid-layer-pattern", "*-*-|*E*E/*-", *MOE],
        ["--pipeline-model-parallel-size", "2"],
        ("pp2-dp2", "tp2-dp2-sp", "dp4-ep2", "pp2-vpp2-dp2", "tp2-pp2-sp", "pp4", "dp4"),
        (),
    ),
}


@dataclass(frozen=True)
class Wanted:
    """One switch of a run, and the fault in it if there is to be one."""

    target: str
    schedule: EngineSchedule
    window_ops: int
    keep_source: KeepSource
    fault: Fault | None


def drawn(layouts: Sequence[str], count: int, chance: random.Random) -> list[Wanted]:
    """``count`` switches from ``layouts[0]`` on, all kinds of faults by turns, one in each ten."""
    found: list[Wanted] = []
    current, passed_over = layouts[0], ""
    kinds: list[Kind] = []
    failing = {ten + chance.randrange(10) for ten in range(0, count, 10)}
    for number in range(count):
        target = chance.choice([each for each in layouts if each not in (current, passed_over)])
        fault = None
        if number in failing:
            kinds = kinds or chance.sample(KINDS, len(KINDS))
            fault = _fault(kinds.pop(), chance)
        found.append(
            Wanted(
                target,
                chance.choice(list(EngineSchedule)),
                chance.choice([4, 32, 256]),
                # What has been freed does not come back, so such a job could not go on.
                KeepSource.always
                if fault
                else chance.choice([KeepSource.always, KeepSource.never]),
                fault,
            )
        )
        # A flip that finds no message to be in lets the switch be done: either may be the layout.
        current, passed_over = (current, target) if fault else (target, "")
    return found


def _fault(kind: Kind, chance: random.Random) -> Fault:
    if kind is Kind.bitflip:
        return Fault(tuple(range(RANKS)), Phase.wire, kind)
    return Fault((chance.randrange(RANKS),), chance.choice(PHASES), kind)


def soak(count: int, seed: int, directory: Path, *, timeout_s: float = 900) -> list[dict[str, Any]]:
    """``count`` switches, dealt to the families; what became of each, on all ranks together."""
    found = []
    for number, name in enumerate(FAMILIES):
        share = count // len(FAMILIES) + (number < count % len(FAMILIES))
        if share:
            wanted = drawn(FAMILIES[name].layouts, share, random.Random(f"{seed} {name}"))
            found += _run(name, wanted, directory / str(number), timeout_s)
    return found


def _run(
    name: str, wanted: Sequence[Wanted], directory: Path, timeout_s: float
) -> list[dict[str, Any]]:
    """One job; a line for each of its switches."""
    family = FAMILIES[name]
    directory.mkdir(parents=True)
    steps = [
        f"{{iteration: {FIRST + i}, layout: '{each.target}'}}" for i, each in enumerate(wanted)
    ]
    run_megatron(
        RANKS,
        [
            *(*family.flags, *family.launch, "--use-distributed-optimizer", *oracle.ORACLE_FLAGS),
            *("--train-iters", str(FIRST + len(wanted) + 2)),
            *("--data-cache-path", str(directory / "cache")),
        ],
        [f"schedule=[{', '.join(steps)}]", *family.engine],
        directory,
        timeout_s=timeout_s,
        inside=lambda: _attach(wanted, directory),
    )
    lines = [around.json_lines(directory / f"soak-{rank}.jsonl") for rank in range(RANKS)]
    checked = [around.json_lines(directory / f"differences-{rank}.jsonl") for rank in range(RANKS)]
    events = around.events(directory)
    found = []
    for number, told in enumerate(zip(*lines, strict=True)):
        done = told[0]["result"] == "done"
        line = {
            "family": name,
            "number": number,
            "source": told[0]["source"],
            "target": told[0]["target"],
            "fault": told[0]["fault"],
            "fired": any(each["fired"] for each in told),
            "result": told[0]["result"],
            "reason": told[0]["reason"],
            "wrong": sorted({text for each in told for text in each["wrong"]}),
        }
        if len({each["result"] for each in told}) > 1:
            line["wrong"].append(f"ranks differ: {[each['result'] for each in told]}")
        line |= _oracle_says([each.pop(0) for each in checked]) if done else {"compared": 0}
        line["wrong"] += line.pop("differences", [])
        _hold_against_event(line, events[number])
        found.append(line)
    if len(found) != len(wanted) or len(events) != len(wanted):
        found[-1]["wrong"].append(f"{len(found)} of {len(wanted)} switches were tried")
    return found


def _oracle_says(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    differences = [name for line in lines for name in line["differences"]]
    if any(line["moved"] != line["lower_bound"] for line in lines):
        differences.append("more bytes were moved than the lower bound")
    if any(line["held_bytes"] for line in lines):
        differences.append("old memory was not given back")
    return {
        "compared": sum(line["compared"] for line in lines),
        "differences": differences,
        "loaded": lines[0]["loaded"],
    }


def _hold_against_event(line: dict[str, Any], event: dict[str, Any]) -> None:
    """What the run wrote of the switch for its user."""
    if line["result"] == "done":
        marks = event.get("fingerprint") or {}
        if not event["ok"] or not marks or marks["before"] != marks["after"]:
            line["wrong"].append(f"the event does not say that it was done well: {event}")
        if line["fault"] and line["fired"]:
            line["wrong"].append("the fault was not noticed")
        return
    if event["ok"] or event["event"] != "refused":
        line["wrong"].append(f"the event does not say that it was called off: {event}")
    if not line["fired"]:
        line["wrong"].append("called off without a fault")


def _attach(wanted: Sequence[Wanted], directory: Path) -> None:
    """Each switch as it was drawn, checked; in a rank."""
    from dynatrain_megatron.plugin import session

    oracle.attach(directory)
    checked = session.switch

    def switch(job: Any, target: Any, options: Any, *worlds: Any) -> Any:
        drawn = wanted[job.iteration - FIRST]
        plan = dataclasses.replace(
            options.plan,
            schedule=drawn.schedule,
            window_ops=drawn.window_ops,
        )
        options = dataclasses.replace(options, plan=plan, keep_source=drawn.keep_source)
        layout, rank = str(job.layout), job.args.rank
        before = {name: tensor.clone() for name, tensor in oracle._state(job).items()}
        faults.arm([] if drawn.fault is None else [drawn.fault])
        line = {
            "source": layout,
            "target": drawn.target,
            "fault": None if drawn.fault is None else str(drawn.fault),
            "result": "done",
            "reason": "",
            "wrong": [],
        }
        try:
            return checked(job, target, options, *worlds)
        except Exception as error:
            line |= {"result": type(error).__name__, "reason": str(error)}
            line["wrong"] = _changed(before, job, layout)
            shutil.rmtree(directory / f"iteration-{job.iteration}", ignore_errors=True)
            raise
        finally:
            line["fired"] = drawn.fault is not None and _has_fired(drawn.fault, rank)
            faults.arm(())
            with (directory / f"soak-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    session.switch = switch  # type: ignore[assignment]


def _changed(before: dict[str, Any], job: Any, layout: str) -> list[str]:
    """Names of what is not as it was before."""
    after = oracle._state(job)
    found = [f"{name} is only on one side" for name in before.keys() ^ after.keys()]
    found += [n for n in before.keys() & after.keys() if not oracle._bit_equal(before[n], after[n])]
    return found + [f"the layout is {job.layout}"] * (str(job.layout) != layout)


def _has_fired(fault: Fault, rank: int) -> bool:
    armed = faults._armed
    return armed.passed[0, rank] >= fault.at and not armed.flips[rank]
