"""Fingerprints of checkpoints that were never in a job: written by torch, without ranks."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings

from dynatrain_megatron.adapters.saved import SavedCheckpoint
from dynatrain_megatron.adapters.saved_state import SavedState, fingerprint_saved
from dynatrain_megatron.cli import main
from dynatrain_megatron.engine import FragmentsBuilder
from dynatrain_megatron.engine.fingerprint import by_label, fingerprint
from dynatrain_megatron.errors import CheckpointError
from dynatrain_megatron.vps import LogicalTensor, Region, RosterSet, State, StateKind
from tests.engine.local import LocalTransport

Tensors = dict[str, torch.Tensor]
KINDS = {
    "fp32_param": StateKind.MAIN_PARAM,
    "exp_avg": StateKind.EXP_AVG,
    "exp_avg_sq": StateKind.EXP_AVG_SQ,
}


def example(*, main: str = "fp32_param", dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """A weight and a bias that are trained, a frozen weight and a buffer."""
    generator = torch.Generator().manual_seed(0)
    found: Tensors = {}
    for key, shape in (("layers.weight", (3, 4, 5)), ("layers.bias", (3, 4))):
        values = torch.randn(shape, generator=generator)
        found[key] = values.to(dtype)
        found[f"optimizer.state.{main}.{key}"] = values
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer.state.{kind}.{key}"] = torch.randn(shape, generator=generator)
    found["frozen.weight"] = torch.randn(6, 2, generator=generator).to(dtype)
    found["router.expert_bias"] = torch.randn(4, generator=generator)
    found["router.count"] = torch.tensor(7)
    return found


def write(tensors: Tensors, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    objects: dict[str, Any] = {"common_state/shard_0_1": io.BytesIO(b"anything")}
    dcp.save({**tensors, **objects}, checkpoint_id=directory, no_dist=True)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return directory


def read(tensors: Tensors, directory: Path) -> SavedState:
    return fingerprint_saved(SavedCheckpoint(write(tensors, directory)))


def in_a_job(tensors: Tensors) -> tuple[str, dict[str, str]]:
    """The fingerprints of the same state as a job of one rank has it."""
    builder = FragmentsBuilder()
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            continue
        name, views = key, {StateKind.PARAM: value}
        if f"optimizer.state.exp_avg.{key}" in tensors:
            views = {KINDS[kind]: tensors[f"optimizer.state.{kind}.{key}"] for kind in KINDS}
        elif key.startswith("router"):
            name, views = f"{key} buffer", {StateKind.BUFFER: value}
        else:
            name = f"{key} param"
        states = tuple(State(k, str(v.dtype).removeprefix("torch.")) for k, v in views.items())
        shape = tuple(value.shape)
        # In two pieces, as a job would hold it on two ranks.
        cut = shape[0] // 2 if shape else 0
        for region in (
            [
                Region((0,) * len(shape), (cut, *shape[1:])),
                Region((cut, *(0,) * (len(shape) - 1)), shape),
            ]
            if cut
            else [Region.whole(shape)]
        ):
            slices = tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))
            builder.add(
                LogicalTensor(name, shape, states), region, [v[slices] for v in views.values()]
            )
    fragments = builder.build()
    rosters = RosterSet.merge([fragments.roster])
    (end,) = LocalTransport.mesh(1)
    mark, sums = fingerprint(rosters, fragments, end, timeout_s=1)
    return mark, by_label(rosters.tensors, sums)


def test_a_checkpoint_has_the_fingerprints_of_the_job(tmp_path: Path) -> None:
    tensors = example()
    found = read(tensors, tmp_path)
    assert (found.fingerprint, found.states) == in_a_job(tensors)
    assert set(found.rounded) == {"layers.weight plain", "layers.bias plain"}
    assert found.shifted == found.incomplete == []
    assert "router.count plain" in found.states
    assert len(found.states) == 2 * 3 + 3


@pytest.mark.parametrize("main", ["param", "fp32_param"])
def test_a_float32_model_has_them_whether_the_optimizer_is_distributed_or_not(
    tmp_path: Path, main: str
) -> None:
    tensors = example(dtype=torch.float32)
    expected = in_a_job(tensors)
    distributed = {key.replace("fp32_param", main): value for key, value in tensors.items()}
    alone = {key: value for key, value in tensors.items() if "fp32_param" not in key}
    for name, saved in (("distributed", distributed), ("alone", alone)):
        found = read(saved, tmp_path / name)
        assert (found.fingerprint, found.states) == expected
        assert found.rounded == {} and found.shifted == []


def test_of_layers_that_are_frozen_the_parameter_is_plain(tmp_path: Path) -> None:
    """Layers share a key: the optimizer has some of them, which torch saves as chunks."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    tensors = example()
    directory = write(tensors, tmp_path)
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for key in [key for key in metadata.state_dict_metadata if key.startswith("optimizer.")]:
        if key.endswith("layers.weight"):  # only layer 1 of 3 is trained
            value = tensors[key][1:2].clone()
            buffer = io.BytesIO()
            torch.save(value, buffer)
            name = f"{key}.distcp"
            (directory / name).write_bytes(buffer.getvalue())
            size = torch.Size((1, 4, 5))
            offset = torch.Size((1, 0, 0))
            metadata.state_dict_metadata[key].chunks = [ChunkStorageMetadata(offset, size)]
            (old,) = [index for index in metadata.storage_data if index.fqn == key]
            info = metadata.storage_data.pop(old)
            info.relative_path, info.offset, info.length = name, 0, len(buffer.getvalue())
            metadata.storage_data[MetadataIndex(key, offset)] = info
    path.write_bytes(pickle.dumps(metadata))
    found = fingerprint_saved(SavedCheckpoint(directory))
    assert found.shifted == found.incomplete == []
    assert "layers.weight plain" in found.states and "layers.weight exp_avg" in found.states
    frozen = tensors["layers.weight"].clone()
    frozen[1] = 0  # zeros add nothing to a sum
    whole = read({"layers.weight": frozen}, tmp_path / "whole")
    assert whole.states["layers.weight plain"] == found.states["layers.weight plain"]


def test_shifted_state_is_told_with_its_zeros(tmp_path: Path) -> None:
    """As the host does it: everything behind some padding moves, and zeros fill the end."""
    tensors = example()
    for kind in KINDS:
        key = f"optimizer.state.{kind}.layers.weight"
        flat = tensors[key].reshape(-1)
        tensors[key] = torch.cat([flat[7:], torch.zeros(7)]).reshape(tensors[key].shape)
    found = read(tensors, tmp_path)
    assert [(each.key, each.zeros) for each in found.shifted] == [("layers.weight", 7)]


def cli(*argv: str) -> tuple[int, str, str]:
    """Exit code, output and complaints of `dynatrain fingerprint`."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["fingerprint", *argv])
    assert "Traceback" not in err.getvalue()
    return code, out.getvalue(), err.getvalue()


def test_the_command_compares_with_a_run(tmp_path: Path) -> None:
    tensors = example()
    checkpoint = write(tensors, tmp_path / "saved" / "iter_0000005")
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("5\n")
    mark, states = in_a_job(tensors)
    event = {
        "event": "switch",
        "iteration": 5,
        "fingerprint": {"before": mark, "after": mark},
        "state_fingerprints": states,
    }
    run = tmp_path / "run"
    run.mkdir()
    events = run / "events.jsonl"
    events.write_text(json.dumps(event) + "\n" + '{"event": "swi')  # it goes on just now
    for where in (checkpoint, checkpoint.parent):
        code, out, _ = cli(str(where), "--run", str(run))
        assert code == 0
        assert f"fingerprint  {mark}, of 9 states" in out
        assert "equal to the run after its switch at iteration 5" in out
        assert f"  {states['layers.bias exp_avg']}  layers.bias exp_avg\n" in out
    code, out, _ = cli(str(checkpoint), "--json")
    content = json.loads(out)
    assert code == 0 and content["fingerprint"] == mark and content["states"] == states

    states["layers.bias exp_avg"] = "0" * 16
    event["fingerprint"] = {"before": "a", "after": "b"}
    events.write_text(json.dumps(event) + "\n")
    code, out, _ = cli(str(checkpoint), "--run", str(run))
    assert code == 1
    assert "different from the run after its switch at iteration 5: layers.bias exp_avg" in out
    events.write_text(json.dumps({**event, "iteration": 4}) + "\n")
    code, _, err = cli(str(checkpoint), "--run", str(run))
    assert code == 2 and "no switch with a fingerprint at iteration 5, but at 4" in err
    events.write_text("nonsense\n{}\n")
    code, _, err = cli(str(checkpoint), "--run", str(run))
    assert code == 2 and "events.jsonl, line 1 is no JSON object" in err
    assert cli(str(checkpoint), "--run", str(tmp_path / "nowhere"))[0] == 2


def test_the_command_tells_of_damage(tmp_path: Path) -> None:
    tensors = example()
    tensors["optimizer.state.fp32_param.layers.bias"] += 1
    code, out, _ = cli(str(write(tensors, tmp_path)))
    assert code == 1
    assert (
        "DAMAGED: main parameters are not what the parameters were rounded from, of layers.b" in out
    )


def change(directory: Path, tensors: Callable[[Tensors], Tensors]) -> Path:
    return write(tensors(example()), directory)


def only(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda all_of_them: {name: all_of_them[name] for name in names}


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (
            lambda t: {**t, "optimizer.distributed.dp_group_idx_0.gbuf": t["frozen.weight"]},
            "is not cut as the parameters are; save with --dist-ckpt-optim-fully-reshardable",
        ),
        (
            lambda t: {**t, "optimizer.state.exp_avg.layers.bias": t["frozen.weight"]},
            "is not cut as the parameters are",
        ),
        (
            lambda t: {**t, "optimizer.state.hessian.layers.bias": t["layers.bias"]},
            "optimizer.state.hessian.layers.bias is of a kind that is not known",
        ),
        (only("optimizer.state.exp_avg.layers.bias"), "state of layers.bias, and not the"),
        (
            lambda t: {"odd": torch.zeros(3, dtype=torch.complex64)},
            "odd has dtype complex64",
        ),
    ],
)  # fmt: skip
def test_what_is_no_fully_reshardable_checkpoint_is_refused(
    tmp_path: Path, tensors: Callable[[Tensors], Tensors], told: str
) -> None:
    code, _, err = cli(str(change(tmp_path, tensors)))
    assert code == 1 and told in err


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for made, told in (
        (lambda d: None, "is no Megatron distributed checkpoint: metadata.json: No such file"),
        (lambda d: (d / "metadata.json").write_text("{"), "names no checkpoint format"),
        (lambda d: (d / "metadata.json").write_text("[]"), "names no checkpoint format"),
        (
            lambda d: (d / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            "has format 'zarr'; only torch_dist can be read",
        ),
        (
            lambda d: (d / "metadata.json").write_text('{"sharded_backend": "torch_dist"}'),
            ".metadata: No such file",
        ),
        (
            lambda d: (d / "latest_checkpointed_iteration.txt").write_text("../../etc"),
            "holds '../../etc', which is no iteration",
        ),
    ):
        made(tmp_path)
        code, _, err = cli(str(tmp_path))
        assert code == 1 and told in err, err


class Evil:
    """What a pickle could do to whoever reads it."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('executed')",)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    directory = write(example(), tmp_path)
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Evil()
    path.write_bytes(pickle.dumps(metadata))
    assert len(fingerprint_saved(SavedCheckpoint(directory)).states) == 9
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="does not describe tensors"):
        SavedCheckpoint(directory)
    metadata.planner_data = None
    for info in metadata.storage_data.values():
        info.relative_path = "../outside.distcp"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is not in the checkpoint's folder"):
        SavedCheckpoint(directory)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_damaged_file_is_never_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    directory = tmp_path / "checkpoint"
    if not directory.exists():
        write(example(), directory)
    path = data.draw(st.sampled_from(sorted(directory.iterdir())))
    sound = path.read_bytes()
    at = data.draw(st.integers(0, len(sound) - 1))
    changed = bytearray(sound)
    changed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path.write_bytes(changed)
    try:
        code, _, err = cli(str(directory))
    finally:
        path.write_bytes(sound)
    assert code in (0, 1)
    assert err == "" or err.startswith("dynatrain fingerprint: ")
