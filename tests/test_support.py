"""The support table in docs/support.md is the recorded one, and its tests exist."""

from __future__ import annotations

import re

from dynatrain_megatron.layout import ParallelLayout
from tests import support
from tests.support import How


def test_the_page_has_the_recorded_table() -> None:
    rows = support.load()
    assert rows
    assert f"{support.BEGIN}\n{support.table(rows)}{support.END}" in support.PAGE.read_text()


def test_every_recorded_test_exists_and_records() -> None:
    for name, row in support.load().items():
        path, _, function = row["test"].partition("::")
        source = (support.ROOT / path).read_text()
        assert f"def {function.rpartition('::')[2]}(" in source, (name, row["test"])
        assert "support(" in source, (name, path)


def test_every_test_named_in_the_page_of_faults_exists() -> None:
    text = (support.ROOT / "docs" / "faults.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) >= 10
    for path, function in named:
        source = (support.ROOT / path).read_text()
        assert not function or f"def {function}(" in source, (path, function)


def test_axes_that_changed() -> None:
    parse = ParallelLayout.parse
    dense = support.changed_axes(parse("tp2-dp2"), parse("pp2-dp2-noopt"))
    assert dense == ["tp", "pp", "dist_opt"]  # etp follows tp
    experts = support.changed_axes(parse("dp4-ep4"), parse("tp2-dp2-ep2-etp1-sp"))
    assert experts == ["tp", "ep", "dp", "sp"]
    stages = support.changed_axes(parse("pp2-pipeline:Et|tttL"), parse("pp2-mbs2"))
    assert stages == ["pipeline", "mbs"]


def test_a_row_counts_pairs_once() -> None:
    pairs = [("tp2", "dp2"), ("dp2", "tp2"), ("tp2", "dp2")]
    row = support.row(How.TRAINED, "tests/a.py::test_a", pairs)
    assert row["pairs"] == 2 and row["layouts"] == 2
    assert row["axes"] == {"tp": 2, "dp": 2}
    text = support.table({"Llama": row, "FSDP": support.row(How.REFUSED, "tests/a.py::test_b")})
    assert "| Llama | 2 | 2 | • | • |" in text
    assert "- FSDP" in text
