"""The demo's dataset: what Megatron reads back is the text that went in."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from dynatrain_megatron.cli import demo_data


def _read_back(prefix: Path) -> list[np.ndarray]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    bounds = dataset.document_indices
    return [
        np.concatenate([dataset[i] for i in range(start, end)])
        for start, end in itertools.pairwise(bounds)
    ]


def test_encode_closes_a_document_after_its_bytes() -> None:
    assert demo_data.encode(b"\x00a\xff").tolist() == [0, 97, 255, 256]
    assert demo_data.encode(b"").tolist() == [256]


def test_megatron_reads_back_every_module(tmp_path: Path) -> None:
    dataset = demo_data.build(tmp_path)
    sources = [path.read_bytes() for path in demo_data.stdlib_sources()]
    documents = _read_back(dataset.prefix)
    assert len(documents) == dataset.documents == len(sources)
    for tokens, source in zip(documents, sources, strict=True):
        assert tokens[-1] == demo_data.END_OF_DOCUMENT
        assert tokens[:-1].astype(np.uint8).tobytes() == source
    assert dataset.tokens == sum(map(len, documents))
    assert max(tokens.max() for tokens in documents) < demo_data.VOCAB_SIZE


@pytest.fixture
def two_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    paths = [tmp_path / "a.py", tmp_path / "b.py"]
    for path in paths:
        path.write_text(f"# {path.name}\n")
    monkeypatch.setattr(demo_data, "stdlib_sources", lambda: paths)
    return paths


def test_a_whole_dataset_is_used_again(tmp_path: Path, two_sources: list[Path]) -> None:
    first = demo_data.build(tmp_path / "data")
    written = first.prefix.with_suffix(".bin").stat().st_mtime_ns
    assert demo_data.build(tmp_path / "data") == first
    assert first.prefix.with_suffix(".bin").stat().st_mtime_ns == written


def test_a_changed_source_is_written_anew(tmp_path: Path, two_sources: list[Path]) -> None:
    before = demo_data.build(tmp_path / "data")
    two_sources[1].write_text("# longer than it was\n")
    after = demo_data.build(tmp_path / "data")
    assert after.tokens > before.tokens
    assert bytes(_read_back(after.prefix)[1][:-1].astype(np.uint8)) == two_sources[1].read_bytes()


def test_an_interrupted_build_is_not_trusted(
    tmp_path: Path, two_sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    demo_data.build(tmp_path / "data")
    two_sources[1].write_text("# longer than it was\n")

    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(demo_data, "write_dataset", interrupted)
        demo_data.build(tmp_path / "data")
    assert not (tmp_path / "data" / "stdlib.json").exists()
    assert demo_data.build(tmp_path / "data").documents == 2
    assert json.loads((tmp_path / "data" / "stdlib.json").read_text())["documents"] == 2
