"""Layouts as text: what is printed, what is read, and that the two are inverse."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynatrain_megatron.errors import LayoutError
from dynatrain_megatron.layout import ParallelLayout, derive, read_changes
from tests.layout.strategies import parallel_layouts


@given(parallel_layouts())
def test_a_printed_layout_reads_back(layout: ParallelLayout) -> None:
    text = str(layout)
    assert ParallelLayout.parse(text) == layout
    assert ParallelLayout.parse(text, world=layout.world) == layout


@given(parallel_layouts(), parallel_layouts())
def test_a_printed_layout_fixes_all_degrees_whatever_the_base(
    layout: ParallelLayout, base: ParallelLayout
) -> None:
    # The options of both are the default ones, so that only degrees can differ.
    layout, base = (
        ParallelLayout(tp=one.tp, pp=one.pp, cp=one.cp, dp=one.dp, ep=one.ep, etp=one.etp)
        for one in (layout, base)
    )
    assert ParallelLayout.parse(str(layout), base, layout.world) == layout


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (ParallelLayout(), "dp1"),
        (ParallelLayout(tp=2, pp=2, dp=2), "tp2-pp2-dp2"),
        (ParallelLayout(tp=2, dp=4, ep=4, sp=True), "tp2-dp4-ep4-sp"),
        (ParallelLayout(pp=4, vpp=2, dist_opt=False), "pp4-vpp2-noopt"),
        (ParallelLayout(tp=4, dp=2, ep=2, etp=1), "tp4-dp2-ep2-etp1"),
        (ParallelLayout(cp=2, dp=4, instances=2, mbs=3), "cp2-dp4-instances2-mbs3"),
        (
            ParallelLayout(pp=2, order="tp-cp-ep-pp-dp", pipeline="Et-t|tL"),
            "pp2-order:tp.cp.ep.pp.dp-pipeline:Et-t|tL",
        ),
    ],
)
def test_the_short_form(layout: ParallelLayout, text: str) -> None:
    assert str(layout) == text
    assert ParallelLayout.parse(text) == layout


def test_a_text_leaves_degrees_at_one_and_options_at_those_of_the_base() -> None:
    base = ParallelLayout(tp=2, dp=4, ep=2, sp=True, dist_opt=False, mbs=2)
    got = ParallelLayout.parse("tp4", base, world=8)
    assert got == ParallelLayout(tp=4, dp=2, ep=1, sp=True, dist_opt=False, mbs=2)
    assert ParallelLayout.parse("tp4-nosp-opt", base, 8) == ParallelLayout(tp=4, dp=2, mbs=2)
    assert ParallelLayout.parse("pp4", base, 8).sp is False


def test_world_gives_dp() -> None:
    assert ParallelLayout.parse("tp2", world=8).dp == 4
    assert ParallelLayout.parse("tp2-world8").dp == 4
    assert ParallelLayout.parse("tp2").dp == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["tp2-pp2-dp2", "''"]),
        ("tpp2", ["'tpp2'", "did you mean 'tp'", "instances", "noopt"]),
        ("tp", ["'tp'"]),
        ("tp2--dp2", ["''"]),
        ("tp2-dp2-", ["''"]),
        ("TP2", ["'TP2'"]),
        ("tp-2", ["'tp'"]),
        ("tp²", ["'tp²'"]),
        ("tp2-tp4", ["tp twice", "2", "4"]),
        ("sp-nosp", ["sp twice", "True", "False"]),
        ("tp0", ["tp", "at least 1", "0"]),
        ("tp1234567890", ["'tp1234567890'"]),
        ("order:tp.dp", ["order='tp-dp'", "tp-cp-ep-dp-pp"]),
        ("pp2-pipeline:", ["pipeline", "''"]),
        ("tp2pipeline:E", ["'tp2pipeline:E'"]),
        ("tp3-world4", ["tp*pp*cp=3*1*1=3", "world=4", "4 mod 3 = 1"]),
        ("sp", ["sp=True", "tp=1"]),
    ],
)
def test_a_wrong_text_is_refused_with_what_is_wrong(text: str, named: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        ParallelLayout.parse(text)
    for part in named:
        assert part in str(caught.value)


@given(st.text(max_size=30) | st.text("tpcedv0123456789-sonorder:. ", max_size=30))
@example("tp" + "9" * 5000)
@example("pipeline:pipeline:E")
def test_any_text_is_a_layout_or_a_layout_error(text: str) -> None:
    try:
        layout = ParallelLayout.parse(text)
    except LayoutError as error:
        assert str(error)
    else:
        assert ParallelLayout.parse(str(layout)) == layout


@given(parallel_layouts(), parallel_layouts())
def test_derive_takes_texts_and_mappings_alike(base: ParallelLayout, to: ParallelLayout) -> None:
    text = str(to)
    changes = read_changes(text)

    def outcome(wanted: object) -> object:
        try:
            return derive(base, wanted, to.world)  # type: ignore[arg-type]
        except LayoutError as error:
            return str(error)

    assert outcome(text) == outcome(changes)
