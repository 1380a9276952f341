"""Every way in which a switch can fail, on purpose: phase × kind × rank × ``engine.keep_source``.

Real Megatron jobs on two CPU ranks. Faults that a job survives follow each other in one job, which
is held against one that never switched; those that end it have a job each. For each case: what
became of the job, whether that is what the documentation promises, and after how many seconds.

    python benchmarks/fault_matrix.py --quick
    python benchmarks/fault_matrix.py             # results/fault_matrix.{json,md} and the docs

Results of a run of some cases take the place of theirs; the others' stay. Exit code 1 means that
something was other than promised.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fault_table
from fault_cases import Case, Keep, Outcome, cases, quick
from fault_job import (
    ELASTIC_S,
    ENGINE_S,
    SILENT_S,
    RankEnded,
    Seen,
    die_with_parent,
    ending,
    lasting,
)
from machine import RESULTS, environment
from ranks import import_hosts

DOCS = Path(__file__).parents[1] / "docs" / "verification.md"
_NUMBER = struct.Struct("=i")


def main() -> int:
    """Run the cases; 0 where all had the outcome that is promised."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="each phase and kind once: 2 minutes")
    parser.add_argument("--keep", choices=list(Keep), help="one of them, and not both")
    parser.add_argument("--jobs", type=int, default=3, help="so many at a time (3)")
    parser.add_argument("--only", nargs="+", help="cases with one of these: 'hang on rank 0'")
    parser.add_argument("--out", type=Path, help="folder for results; none with --quick or --only")
    args = parser.parse_args()
    chosen = quick() if args.quick else [case for keep in Keep for case in cases(keep)]
    chosen = [
        case
        for case in chosen
        if args.keep in (None, case.keep) and any(text in str(case) for text in args.only or [""])
    ]
    begin = time.time()
    where = environment("torch", "megatron-core")
    commit = where.pop("commit")
    rows = [row | {"commit": commit} for row in run(chosen, args.jobs)]
    content = {
        "environment": where,
        "limits": {
            "engine.timeout_s": ENGINE_S,
            "elastic.timeout_s": ELASTIC_S,
            "without a sign of life": 2 * SILENT_S,
        },
        "cases": rows,
    }
    print(fault_table.report(content))
    print(f"{len(rows)} cases in {time.time() - begin:.0f} s")
    if args.out is not None or not (args.quick or args.only):
        write(content, args.out or RESULTS)
    return int(any(row["problems"] for row in rows))


def write(content: dict[str, Any], folder: Path) -> None:
    """The results, and where they are the project's own, the table in the documentation."""
    file = folder / "fault_matrix.json"
    rows = json.loads(file.read_text())["cases"] if file.exists() else []
    rows = {_key(row): row for row in [*rows, *content["cases"]]}
    keys = [_key(dataclasses.asdict(case)) for keep in Keep for case in cases(keep)]
    content["cases"] = [rows[key] for key in keys if key in rows]
    file.write_text(json.dumps(content, indent=1) + "\n")
    (folder / "fault_matrix.md").write_text(fault_table.report(content))
    if folder == RESULTS:
        DOCS.write_text(fault_table.put_into(DOCS.read_text(), content))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[field.name] for field in dataclasses.fields(Case))


def run(chosen: Sequence[Case], num_jobs: int) -> list[dict[str, Any]]:
    """All cases, in processes that take one job after the other; rows of the table in order."""
    works = [
        many
        for outcome in (Outcome.goes_on, Outcome.commits)
        for keep in Keep
        if (many := [c for c in chosen if (c.promised, c.keep) == (outcome, keep)])
    ]
    works += [[case] for case in chosen if case.promised is Outcome.ends]
    import_hosts()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))  # no context: forked ranks would leave it
    from tests.ranks import store_apart

    with store_apart() as store:
        todo, feed = os.pipe()
        workers = [_worker(works, (todo, feed), str(store), folder, n) for n in range(num_jobs)]
        os.close(todo)
        for number in range(len(works)):
            os.write(feed, _NUMBER.pack(number))
        os.close(feed)
        failed = [pid for pid in workers if os.waitpid(pid, 0)[1]]
    files = sorted(folder.glob("seen-*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    shutil.rmtree(folder)
    if failed:
        raise RuntimeError(f"{len(failed)} of the processes that run jobs failed")
    order = {str(case): number for number, case in enumerate(chosen)}
    return sorted(rows, key=lambda row: order[row.pop("case")])


def _worker(
    works: list[list[Case]], pipe: tuple[int, int], store: str, folder: Path, number: int
) -> int:
    """A process that does what comes through the pipe; its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        todo, feed = pipe
        os.close(feed)
        with (folder / f"seen-{number}.jsonl").open("a") as file:
            while read := os.read(todo, _NUMBER.size):
                (index,) = _NUMBER.unpack(read)
                begin = time.time()
                for case, seen in _seen(works[index], store, folder / str(index)):
                    file.write(json.dumps(_row(case, seen)) + "\n")
                    if seen.problems:
                        print(f"{case}: {'; '.join(seen.problems)}\n{seen.told}", flush=True)
                file.flush()
                what = works[index][0] if len(works[index]) == 1 else f"{len(works[index])} cases"
                print(f"{time.time() - begin:6.1f} s  {what}", flush=True)
        code = 0
    finally:
        if not isinstance(sys.exception(), RankEnded):
            os._exit(code)
    raise AssertionError


def _seen(work: list[Case], store: str, folder: Path) -> list[tuple[Case, Seen]]:
    one = work[0]
    if one.promised is Outcome.ends:
        return [(one, ending(one, store, folder))]
    return list(zip(work, lasting(work, store, folder), strict=True))


def _row(case: Case, seen: Seen) -> dict[str, Any]:
    problems = list(seen.problems)
    if seen.outcome is not None and seen.outcome is not case.promised:
        problems.append(f"the job {seen.outcome}, where it {case.promised}")
    return {
        "case": str(case),
        "keep": case.keep,
        "phase": case.phase,
        "at": case.at,
        "kind": case.kind,
        "rank": case.rank,
        "promised": case.promised,
        "outcome": seen.outcome,
        "seconds": None if seen.seconds is None else round(seen.seconds, 2),
        "ended": None if seen.ended is None else round(seen.ended, 2),
        "problems": problems,
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for what tests have, too
    try:
        code = main()
    except RankEnded as end:
        code = end.code
    sys.exit(code)
