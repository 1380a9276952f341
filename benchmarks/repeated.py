"""Where the stall of a switch goes when a job goes to and fro between two layouts.

A real Megatron job on CPU ranks, one step in each layout; at a switch back groups, objects,
rosters and plan are known. Printed are seconds by phase of the first switch each way and the
medians of the later ones, and the share of data movement::

    share = (memory + pack + wire + unpack + rebuild + commit) / (stall - verify)

``rebuild`` gathers parameters from main parameters; ``commit`` gives the old memory back and takes
the new gradients'. Verification is optional (engine.verify) and kept apart; the share with it in
the stall, where it does not count as data movement, is printed beside.

    python benchmarks/repeated.py --quick
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import keep

ENTRY = "dynatrain_megatron.plugin.pretrain_gpt"
ROOT = Path(__file__).parents[1]
DATA = ("memory", "pack", "wire", "unpack", "rebuild", "commit")

Row = dict[str, float]


def flags(hidden: int, layers: int) -> list[str]:
    """A Llama-shaped model in float32, with steps as short as they can be."""
    return [
        *("--num-layers", str(layers), "--hidden-size", str(hidden), "--num-attention-heads", "8"),
        *("--seq-length", "32", "--max-position-embeddings", "32", "--mock-data"),
        *("--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "1e-4"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"),
        *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--use-distributed-optimizer"),
        *("--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000"),
        *("--num-workers", "0", "--tensor-model-parallel-size", "2"),
        *("--pipeline-model-parallel-size", "2"),
    ]


def run(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Train, switching after every step; the events of the switches in order."""
    layouts = ["tp2-pp2", args.other]
    switches = 2 * args.rounds
    steps = [f"{{iteration: {i + 1}, layout: {layouts[(i + 1) % 2]}}}" for i in range(switches)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "--redirects", "3", "--log-dir", str(directory / "ranks")]
    command += ["-m", ENTRY, *flags(args.hidden, args.layers)]
    command += ["--train-iters", str(switches + 1), "--data-cache-path", str(directory)]
    command += ["--dynatrain", f"run_dir={directory}", "platform=cpu"]
    command += [f"schedule=[{', '.join(steps)}]", *args.override]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def row(events: list[dict[str, Any]]) -> Row:
    """Medians over switches the same way."""
    names = list(events[0]["seconds"])
    found = {name: statistics.median(e["seconds"].get(name, 0.0) for e in events) for name in names}
    found["stall"] = statistics.median(e["stall_s"] for e in events)
    for name, verify in (("share", 1), ("share with verify", 0)):
        found[name] = statistics.median(
            sum(e["seconds"].get(part, 0.0) for part in DATA)
            / (e["stall_s"] - verify * e["seconds"].get("verify", 0.0))
            for e in events
        )
    found["groups made"] = statistics.median(e["groups"]["created"] for e in events)
    found["MB moved"] = statistics.median(e["bytes"]["moved"] for e in events) / 1e6
    return found


def table(events: list[dict[str, Any]]) -> dict[str, Row]:
    """A column for the first and one for the later switches, each way."""
    columns = {}
    for way in range(2):
        same = events[way::2]
        title = f"{same[0]['source']} -> {same[0]['target']}"
        columns[f"{title} first"] = row(same[:1])
        columns[f"{title} later"] = row(same[1:])
    return columns


def main() -> int:
    """Run it and print one table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, about a minute")
    parser.add_argument("--other", default="dp4", help="the layout beside tp2-pp2, of 4 ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=4, help="to and fro, two at least")
    parser.add_argument("--override", nargs="*", default=[], help="such as elastic.cache_worlds=0")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="file of results to put these into")
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.rounds = 512, 3
    with tempfile.TemporaryDirectory() as folder:
        columns = table(run(args, Path(folder)))
    if args.out is not None:
        keep(args.out, f"tp2-pp2 and {args.other}, {args.layers} layers of {args.hidden}", columns)
    if args.json:
        print(json.dumps(columns))
        return 0
    print(f"{'':18s}" + "".join(f"{title.replace(' -> ', '>'):>22s}" for title in columns))
    for name in next(iter(columns.values())):
        print(f"{name:18s}" + "".join(f"{line.get(name, 0.0):22.3f}" for line in columns.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
