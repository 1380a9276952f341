"""Look at this machine and what is installed, and say what will work here and what will not.

Versions; the names of Megatron and torch that the plugin hooks into, replaces and calls; GPUs,
NCCL, Transformer Engine and Apex; ports, names, files; with --store whether that store answers.
Each thing that is not as it should be comes with what mends it. Takes some seconds, since Megatron
is imported. Exit code 1 where a job could not run or not change its layout; what is only noted
keeps single features from working.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from dynatrain_megatron.cli import doctor_checks as checks
from dynatrain_megatron.cli.doctor_checks import Finding, Status
from dynatrain_megatron.elastic.store import StoreAddress

SUMMARY = "say what works on this machine, what does not, and what mends it"

_COLOURS = {Status.ok: "\033[32m", Status.note: "\033[33m", Status.fail: "\033[31m"}
_PLAIN = "\033[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--store", metavar="HOST:PORT", help="see whether this store answers")


def run(args: argparse.Namespace) -> int:
    """Look at everything and print it; 1 where something fails."""
    findings = list(_look(None if args.store is None else StoreAddress.parse(args.store)))
    failed = [finding for finding in findings if finding.status is Status.fail]
    works, lacks = (
        [f.ability for f in findings if f.ability and (f.status is Status.ok) is wanted]
        for wanted in (True, False)
    )
    if args.json:
        shown = [asdict(finding) for finding in findings]
        found = {"ok": not failed, "findings": shown, "works": works, "does_not_work": lacks}
        print(json.dumps(found, indent=2))
    else:
        _show(findings)
        print(f"\nWorks here: {'; '.join(works) or 'nothing'}.")
        if lacks:
            print(f"Does not:   {'; '.join(lacks)}.")
        if failed:
            print(f"{len(failed)} of {len(findings)} checks failed; mend what is marked first.")
    return 1 if failed else 0


def _look(store: StoreAddress | None) -> Iterator[Finding]:
    yield from checks.versions()
    yield from checks.devices()
    yield from checks.host_names()
    yield from checks.libraries()
    yield from checks.dataset_helpers()
    yield from checks.machine()
    if store is not None:
        yield from checks.store(store)


def _show(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            print(topic)
        print(f"  {_word(finding.status)} {finding.name:{width}}  {finding.found}")
        if finding.fix:
            print(f"       {'':{width}}  fix: {finding.fix}")


def _word(status: Status) -> str:
    word = f"{status.upper() if status is Status.fail else status:4}"
    return f"{_COLOURS[status]}{word}{_PLAIN}" if sys.stdout.isatty() else word
