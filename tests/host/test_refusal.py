"""Switches that are not possible are refused before anything is changed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.transition import Target
from dynatrain_megatron.transition.posted import Posted
from tests.host import around
from tests.ranks import TINY_LLAMA, RankFailure, run_megatron

FLAGS = [*TINY_LLAMA, "--use-distributed-optimizer", "--tensor-model-parallel-size", "2"]

# What is asked for on 4 ranks of a model with 4 heads, 2 KV groups, 4 layers, 1024 vocabulary
# rows and a global batch of 8, and what the message must say: the rule and both values.
REFUSED = [
    ("{tp: 3}", r"tp\*pp\*cp=3\*1\*1=3 must divide world=4"),
    ("{tp: 8}", r"must divide world=4"),
    ("{tp: 1, pp: 4, vpp: 2}", r"pp\*vpp=4\*2=8 .*num_layers=4"),
    ("{tp: 1, dp: 4, mbs: 4}", r"mbs\*dp=4\*4=16 .*global_batch_size=8"),
    ("{tp: 1, dp: 2}", r"dp=2 must be"),
    ("{tp: 1, sp: true}", r"sp"),
    ("{tp: 1, cp: 4}", r"cp=4 with --cp-comm-type a2a needs Transformer Engine"),
    ("{tp: 1, order: dp-tp-cp-ep-pp}", r"order=dp-tp-cp-ep-pp"),
]


@pytest.mark.host
def test_each_refusal_names_the_rule_and_the_job_goes_on(tmp_path: Path) -> None:
    """Eight impossible requests, then a possible one: training never stops."""
    entries = [f"{{iteration: {i + 1}, layout: {layout}}}" for i, (layout, _) in enumerate(REFUSED)]
    last = len(REFUSED) + 1
    entries.append(f"{{iteration: {last}, layout: {{tp: 1, pp: 2}}}}")
    run = run_megatron(
        4,
        [*FLAGS, "--train-iters", str(last + 1), "--cp-comm-type", "a2a"],
        [f"schedule=[{', '.join(entries)}]"],
        tmp_path,
    )
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["refused"] * len(REFUSED) + ["switch"]
    for event, (layout, pattern) in zip(events[:-1], REFUSED, strict=True):
        assert re.search(pattern, event["reason"]), (layout, event["reason"])
        assert event["source"] == "tp2-dp2" and event["ok"] is False
    assert events[-1]["target"] == "pp2-dp2"
    warned = re.findall(r"warning: the switch at iteration (\d+) is not possible", run.logs[0])
    assert [int(n) for n in warned] == list(range(1, len(REFUSED) + 1))  # said before the start
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [step["iteration"] for step in steps] == list(range(1, last + 2))


@pytest.mark.host
@pytest.mark.parametrize(
    ("overrides", "extra", "message"),
    [
        (
            ["target=tp3", "switch_at=2", "on_refusal=fail"],
            [],
            r"the switch at iteration 2 is not possible: .*must divide world=4",
        ),
        (
            ["target={tp: 1}", "switch_at=2", "on_refusal=fail"],
            ["--optimizer", "lion"],
            r"--optimizer lion is not supported in a switch: .*; run without --optimizer",
        ),
        (
            ["target=dp4-opt", "switch_at=2", "on_refusal=fail"],
            ["--optimizer", "sgd"],
            r"--optimizer sgd has no distributed optimizer .* ask for a layout with noopt",
        ),
        (
            ["target={tp: 1, pp: 2}", "switch_at=2", "on_refusal=fail"],
            ["--mtp-num-layers", "1", "tied"],
            r"--mtp-num-layers 1 with tied embeddings .*pp=1 -> pp=2.* keep pp at 1",
        ),
        (["source=pp2-dp2"], [], r"source=pp2-dp2 is not the layout of the flags"),
        (
            ["schedule=[{iteration: 4, layout: tp4}, {iteration: 3, layout: dp4}]"],
            [],
            r"schedule.*3.*4|schedule.*4.*3",
        ),
        (["targt=tp4"], [], r"targt.*did you mean 'target'"),
    ],
    ids=[
        *("impossible layout", "unsupported optimizer", "SGD", "tied prediction"),
        *("wrong source", "order", "unknown key"),
    ],
)
def test_what_cannot_work_ends_before_any_process_group(
    overrides: list[str], extra: list[str], message: str, tmp_path: Path
) -> None:
    left_out = {"tied": "--untie-embeddings-and-output-weights"}
    left_out |= dict.fromkeys(("lion", "sgd"), "--use-distributed-optimizer")
    flags = [flag for flag in FLAGS if flag not in {left_out.get(word) for word in extra}]
    extra = [word for word in extra if word != "tied"]
    with pytest.raises(RankFailure, match="2") as failure:
        run_megatron(4, [*flags, *extra], overrides, tmp_path)
    log = (tmp_path / "rank0.log").read_text()
    assert re.search(message, log), log[-2000:]
    assert "Traceback" not in log
    assert "initializing torch distributed" not in log
    assert "exit" in str(failure.value).lower()


ODD_VOCABULARY = [
    *(*TINY_LLAMA, "--use-distributed-optimizer", "--vocab-size", "1001"),
    *("--make-vocab-size-divisible-by", "1", "--global-batch-size", "4", "--train-iters", "6"),
]


@pytest.mark.host
def test_rows_padded_for_the_launch_stay_and_losses_with_them(tmp_path: Path) -> None:
    """1001 rows are 1002 for tp 2, and stay that many in layouts for which 1001 would do."""
    flags = [*ODD_VOCABULARY, "--tensor-model-parallel-size", "2"]
    schedule = (
        "schedule=[{iteration: 2, layout: dp2}, {iteration: 4, layout: pp2}, "
        "{iteration: 5, layout: tp2}]"
    )
    rows = tmp_path / "rows"

    def note(logged: Mapping[str, Any]) -> None:
        from megatron.training import get_args

        with rows.open("a") as file:
            file.write(f"{get_args().padded_vocab_size}\n")

    static = run_megatron(2, flags, [], tmp_path / "static")
    switched = run_megatron(
        2, flags, [schedule], tmp_path / "switched", inside=lambda: around.at_each_log(note)
    )
    assert rows.read_text().split() == ["1002"] * 12
    expected, got = around.steps(static.run_dir), around.steps(switched.run_dir)
    assert [step["layout"] for step in got] == ["tp2", "tp2", "dp2", "dp2", "pp2", "tp2"]
    for a, b in zip(expected, got, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)


@pytest.mark.host
def test_rows_that_the_new_tp_cannot_cut_are_a_reason_to_refuse(tmp_path: Path) -> None:
    run_megatron(2, ODD_VOCABULARY, ["target=tp2", "switch_at=2"], tmp_path)
    (event,) = around.events(tmp_path)
    assert event["event"] == "refused"
    assert "tp=2 must divide padded_vocab_size=1001" in event["reason"]
    assert "--make-vocab-size-divisible-by" in event["reason"]
    assert len(around.steps(tmp_path)) == 6


def lose_layers_in_the_target() -> None:
    """The second model that is made has a layer too few, without a word of it; in a rank."""
    from megatron.core.models.gpt import GPTModel

    real, made = GPTModel.__init__, []

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if made:
            self.decoder.layers = self.decoder.layers[:-1]
        made.append(self)

    GPTModel.__init__ = init


@pytest.mark.host
def test_a_target_that_would_lose_layers_is_refused(tmp_path: Path) -> None:
    run_megatron(
        2,
        [*TINY_LLAMA, "--use-distributed-optimizer", "--global-batch-size", "4"],
        ["target=tp2", "switch_at=2"],
        tmp_path,
        inside=lose_layers_in_the_target,
    )
    (event,) = around.events(tmp_path)
    assert event["event"] == "refused"
    assert re.search(r"does not hold the same state: '\S+' has \d+ elements now", event["reason"])
    assert [step["layout"] for step in around.steps(tmp_path)] == ["dp2"] * 4


def fail_to_describe_on_the_second_rank() -> None:
    """Megatron's description of a checkpoint raises; in a rank."""
    from dynatrain_megatron.adapters import state

    real = state._checkpoint_entries

    def entries(*args: Any) -> Any:
        import torch.distributed as dist

        assert dist.get_rank() != 1, "no such key " + 100 * "in a very long dictionary, "
        return real(*args)

    state._checkpoint_entries = entries


@pytest.mark.host
def test_a_state_that_one_rank_cannot_describe_is_a_reason_to_refuse(tmp_path: Path) -> None:
    run_megatron(
        2,
        [*TINY_LLAMA, "--use-distributed-optimizer", "--global-batch-size", "4"],
        ["target=tp2", "switch_at=2"],
        tmp_path,
        inside=fail_to_describe_on_the_second_rank,
    )
    (event,) = around.events(tmp_path)
    assert event["event"] == "refused"
    assert event["reason"].startswith(
        "rank 1: the state could not be described: AssertionError: no such key in a very long"
    )
    assert len(event["reason"]) < 600
    assert [step["layout"] for step in around.steps(tmp_path)] == ["dp2"] * 4


@pytest.mark.host
def test_of_several_passed_entries_the_last_counts_and_no_switch_to_where_one_is(
    tmp_path: Path,
) -> None:
    """Skipped iterations have no boundary, as those before a restart have none."""
    schedule = ", ".join(
        f"{{iteration: {at}, layout: {to}}}"
        for at, to in ((1, "dp2"), (3, "tp2"), (4, "pp2"), (6, "tp2"))
    )
    run = run_megatron(
        2,
        [
            *(*TINY_LLAMA, "--use-distributed-optimizer", "--global-batch-size", "4"),
            *("--iterations-to-skip", "3", "4", "--train-iters", "7"),
        ],
        [f"schedule=[{schedule}]"],
        tmp_path,
    )
    found = [(e["iteration"], e["source"], e["target"]) for e in around.events(tmp_path)]
    assert found == [(5, "dp2", "pp2"), (6, "pp2", "tp2")]
    assert "iteration 1: already in layout dp2" in run.logs[0]


@pytest.mark.host
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_one_rank_alone_refuses_is_refused_by_all(rank: int, tmp_path: Path) -> None:
    """What one process knows to be impossible, as no other does; the next step is made."""

    def refuse_once() -> None:
        from dynatrain_megatron.plugin.session import Session

        check, refused = Session._check_posted, []

        def checked(session: Session, posted: Posted) -> Target:
            if os.environ["RANK"] == str(rank) and not refused:
                refused.append(posted)
                raise SwitchRefused("this process cannot", "let it be")
            return check(session, posted)

        Session._check_posted = checked  # type: ignore[method-assign]

    steps = "{iteration: 2, layout: {tp: 1, pp: 2}}, {iteration: 4, layout: {tp: 1, pp: 2}}"
    flags = [*FLAGS, "--train-iters", "6"]
    run_megatron(2, flags, [f"schedule=[{steps}]"], tmp_path, inside=refuse_once)
    told = around.events(tmp_path)
    assert [(event["event"], event["iteration"]) for event in told] == [
        ("refused", 2),
        ("switch", 4),
    ]
    assert "this process cannot" in told[0]["reason"]
    assert (told[1]["source"], told[1]["target"]) == ("tp2", "pp2")
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["layout"] for line in lines] == ["tp2"] * 4 + ["pp2"] * 2
