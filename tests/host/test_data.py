"""The samples of every step and of every evaluation, in runs that switch and in runs that do not.

Each rank notes the rows of tokens and labels that it is given; over the data-parallel ranks they
must be the same rows, each as often, at the same iterations.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynatrain_megatron.adapters.datasets import write_indexed
from tests.host import around
from tests.ranks import TINY_LLAMA, run_megatron

Rows = dict[str, Counter[int]]

COMMON = [
    *TINY_LLAMA,
    *("--seq-length", "16", "--max-position-embeddings", "16", "--use-distributed-optimizer"),
    *("--train-iters", "10", "--eval-interval", "3", "--eval-iters", "2"),
]
COMMON.remove("--mock-data")
SINGLE = [*COMMON, "--num-workers", "2"]
CYCLIC = [
    *COMMON,
    *("--dataloader-type", "cyclic", "--micro-batch-size", "2", "--num-workers", "1"),
    *("--decrease-batch-size-if-needed", "--global-batch-size", "9"),
    *("--eval-global-batch-size", "8", "--eval-micro-batch-size", "1"),
]
SCHEDULED = [
    *COMMON,
    *("--step-batch-size-schedule", "0:4 256:8", "--eval-global-batch-size", "2"),
    *("--dataloader-type", "cyclic", "--no-data-sharding"),
    *("--full-validation", "--multiple-validation-sets", "--eval-micro-batch-size", "1"),
]
GLOBAL_BATCH = SCHEDULED.index("--global-batch-size")
del SCHEDULED[GLOBAL_BATCH : GLOBAL_BATCH + 2]
FLAGS = [SINGLE, CYCLIC, SCHEDULED]


def write_data(directory: Path, *sizes: int) -> list[str]:
    """Write a dataset of random documents, five sequences each, for each size; the prefixes."""
    prefixes = []
    for seed, num_documents in enumerate(sizes):
        random = np.random.default_rng(seed)
        prefix = directory / f"data-{seed}"
        write_indexed(
            prefix,
            (random.integers(0, 1000, size=80, dtype=np.uint16) for _ in range(num_documents)),
        )
        prefixes.append(str(prefix))
    return prefixes


def note_rows(directory: Path) -> None:
    """Write down what ``get_batch`` gives to each first tensor-parallel rank; in a rank."""
    from megatron.core import mpu
    from megatron.training import get_args

    from dynatrain_megatron.plugin import gpt_steps

    real = gpt_steps.get_batch

    def get_batch(iterator: Any, model: Any) -> Any:
        batch, args = real(iterator, model), get_args()
        if mpu.get_tensor_model_parallel_rank() == 0:
            for kind in ("tokens", "labels"):
                if batch[kind] is not None:
                    line = {
                        "at": f"{'train' if model.training else 'eval'} {args.curr_iteration + 1}",
                        "kind": kind,
                        "rows": [zlib.crc32(row.numpy().tobytes()) for row in batch[kind]],
                    }
                    with (directory / f"rows-{args.rank}.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")
        return batch

    gpt_steps.get_batch = get_batch


def rows(directory: Path, kind: str) -> Rows:
    """How often each row was in each step, on any rank."""
    found: Rows = defaultdict(Counter)
    for path in directory.glob("rows-*.jsonl"):
        for line in around.json_lines(path):
            if line["kind"] == kind:
                found[line["at"]].update(line["rows"])
    return dict(found)


class Head:
    """The first samples of a dataset, so that a run goes through it several times."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset, self.length = dataset, length
        self.index_split = dataset.index_split

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def shorten(train: int, valid: int) -> None:
    """Leave so many samples in the datasets; in a rank."""
    from dynatrain_megatron.plugin import gpt_steps

    real = gpt_steps.datasets_provider

    def provider(num_samples: Any, vp_stage: int | None = None) -> Any:
        whole = real(num_samples, vp_stage)
        heads = (Head(d, n) for d, n in zip(whole, (train, valid, 9), strict=True) if d)
        return tuple(heads) or whole

    provider.is_distributed = True  # type: ignore[attr-defined]
    gpt_steps.datasets_provider = provider


def one_pass(found: Rows) -> Rows:
    """The rows of evaluations that went through a whole set several times, as if it were once."""
    for at, counts in found.items():
        if at.startswith("eval"):
            passes = math.gcd(*counts.values())
            found[at] = Counter({row: n // passes for row, n in counts.items()})
    return found


def compare(
    base: Path,
    flags: list[str],
    switches: dict[int, str],
    *,
    prepare: Callable[[], None] | None = None,
    counted: Callable[[Rows], Rows] = dict,
) -> None:
    """Run with and without switches and compare rows, losses and what is derived from counts."""
    entries = (f"{{iteration: {at}, layout: {{{to}}}}}" for at, to in switches.items())
    for name, overrides in (("static", []), ("switched", [f"schedule=[{', '.join(entries)}]"])):
        (base / name).mkdir()

        def inside(directory: Path = base / name) -> None:
            note_rows(directory)
            if prepare is not None:
                prepare()

        run_megatron(2, flags, overrides, base / name, inside=inside)
    static, switched = base / "static", base / "switched"
    done = around.events(switched)
    assert [event["iteration"] for event in done if event["ok"]] == list(switches)
    assert len(done) == len(switches)
    for a, b in zip(around.steps(static), around.steps(switched), strict=True):
        assert (a["lr"], a["consumed_samples"]) == (b["lr"], b["consumed_samples"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), (a, b)
    losses = [
        around.validation_lines((run / "rank1.log").read_text()) for run in (static, switched)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(losses[0]) >= 4
    for kind in ("tokens", "labels"):
        expected = counted(rows(static, kind))
        assert {f"train {i}" for i in range(1, 11)} <= set(expected)
        assert counted(rows(switched, kind)) == expected


@pytest.mark.host
@pytest.mark.slow
def test_a_blend_read_in_order(tmp_path: Path) -> None:
    """Micro-batch sizes that change with the layout, a virtual pipeline, loader workers."""
    a, b = write_data(tmp_path, 24, 24)
    flags = [*SINGLE, "--data-path", "0.3", a, "0.7", b, "--split", "80,10,10"]
    switches = {
        2: "tp: 2, mbs: 2",
        4: "pp: 2, vpp: 2",
        6: "mbs: 4",
        8: "dp: 2",
    }
    compare(tmp_path, flags, switches)


@pytest.mark.host
@pytest.mark.slow
def test_the_random_loader(tmp_path: Path) -> None:
    """Through datasets of 21 and 15 samples several times, with batches cut from 9 to 8."""
    (a,) = write_data(tmp_path, 24)
    flags = [*CYCLIC, "--data-path", a, "--split", "80,10,10"]
    switches = {2: "tp: 2", 4: "mbs: 1", 5: "pp: 2, mbs: 4", 7: "dp: 2"}
    compare(tmp_path, flags, switches, prepare=lambda: shorten(21, 15))


@pytest.mark.host
@pytest.mark.slow
def test_a_growing_batch_and_whole_validation_sets(tmp_path: Path) -> None:
    """More data-parallel ranks with a larger batch; datasets of their own for each split."""
    a, b, c, d = write_data(tmp_path, 24, 3, 5, 2)
    flags = [*SCHEDULED, "--train-data-path", a, "--valid-data-path", b, c]
    flags += ["--test-data-path", d, "--exit-interval", "10"]  # which Megatron could not evaluate
    switches = {2: "pp: 2, mbs: 2", 5: "mbs: 2", 7: "pp: 2, mbs: 4", 9: "dp: 2"}
    # How often Megatron goes through a whole set depends on dp.
    compare(tmp_path, flags, switches, counted=one_pass)
