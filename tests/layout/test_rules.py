"""What a layout must obey, by itself, when derived from another, and for a model."""

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynatrain_megatron.errors import DynaTrainError, LayoutError
from dynatrain_megatron.layout import (
    LAYOUT_KEYS,
    ModelShape,
    ParallelLayout,
    derive,
    read_changes,
)
from tests.layout.every import layouts
from tests.layout.strategies import ORDERS, parallel_layouts


def refused(values: Mapping[str, object]) -> str:
    with pytest.raises(LayoutError) as caught:
        ParallelLayout(**values)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp must be a whole number of at least 1, got 0"),
        ({"pp": -2}, "pp must be a whole number of at least 1, got -2"),
        ({"dp": "2"}, "dp must be a whole number of at least 1, got '2'"),
        ({"cp": 2.0}, "cp must be a whole number of at least 1, got 2.0"),
        ({"tp": True}, "tp must be a whole number of at least 1, got True"),
        ({"ep": None}, "ep must be a whole number of at least 1, got None"),
        ({"mbs": 0}, "mbs must be a whole number of at least 1, got 0"),
        ({"tp": 2, "sp": 1}, "sp must be true or false, got 1"),
        ({"dist_opt": "yes"}, "dist_opt must be true or false, got 'yes'"),
        ({"order": 3}, "order must be a text, got 3"),
        ({"pipeline": ""}, "pipeline must be a text, got ''"),
        (
            {"order": "tp-dp-pp"},
            "order='tp-dp-pp' must name each of cp, dp, ep, pp, tp once, "
            "for example 'tp-cp-ep-dp-pp'",
        ),
        ({"sp": True}, "sequence parallelism (sp=True) needs tp > 1, but tp=1"),
        ({"vpp": 2}, "virtual pipelines (vpp=2) need pp > 1, but pp=1"),
        (
            {"dp": 4, "ep": 3},
            "etp*ep*pp=1*3*1=3 must divide world=4 (4 mod 3 = 1)",
        ),
        (
            {"tp": 2, "dp": 2, "etp": 3},
            "etp*ep*pp=3*1*1=3 must divide world=4 (4 mod 3 = 1)",
        ),
        ({"dp": 4, "instances": 3}, "instances=3 must divide dp*cp=4 (4 mod 3 = 1)"),
        (
            {"dp": 4, "ep": 4, "instances": 2},
            "instances=2 must divide expert dp=1 (1 mod 2 = 1)",
        ),
        (
            {"dp": 4, "instances": 2, "dist_opt": False},
            "instances=2 needs the distributed optimizer, but dist_opt=False",
        ),
        (
            {"pp": 2, "dp": 4, "ep": 2, "order": "tp-cp-ep-pp-dp"},
            "with pp not last in order='tp-cp-ep-pp-dp', the data parallel degrees of dense and "
            "expert layers must be equal, but dp=4 and expert dp=2",
        ),
        (
            {"tp": 2, "pp": 2, "cp": 2, "etp": 4, "order": "tp-pp-cp-ep-dp"},
            "order='tp-pp-cp-ep-dp' puts the stages of a pipeline 2 ranks apart for dense and "
            "4 ranks apart for expert layers; both must be equal",
        ),
    ],
)
def test_a_layout_wrong_in_itself_names_the_rule_and_both_values(
    values: dict[str, object], message: str
) -> None:
    assert refused(values) == message


def test_a_layout_error_is_also_a_value_error_and_ours() -> None:
    assert issubclass(LayoutError, ValueError)
    assert issubclass(LayoutError, DynaTrainError)


def test_what_follows_from_other_fields_is_filled_in() -> None:
    layout = ParallelLayout(tp=4, pp=2, cp=2, dp=3, ep=2, vpp=1)
    assert (layout.world, layout.etp, layout.expert_tp, layout.vpp) == (48, 4, 4, None)
    assert layout.expert_dp == 48 // (4 * 2 * 2)


def test_layouts_are_values() -> None:
    one, two = ParallelLayout(tp=2), ParallelLayout(tp=2, etp=2)
    assert one == two and hash(one) == hash(two)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.tp = 4  # type: ignore[misc]


# ---------------------------------------------------------------- derive


@given(parallel_layouts())
def test_nothing_changed_gives_the_base(base: ParallelLayout) -> None:
    assert derive(base, {}, base.world) == base


@given(parallel_layouts(), st.integers(1, 3))
def test_more_ranks_become_data_parallelism(base: ParallelLayout, times: int) -> None:
    base = dataclasses.replace(base, order=ORDERS[0], ep=1, etp=base.tp, instances=1)
    got = derive(base, {}, base.world * times)
    assert got == dataclasses.replace(base, dp=base.dp * times)


@pytest.mark.parametrize(
    ("base", "changes", "world", "wanted"),
    [
        ("tp2-dp2", {"tp": 1, "pp": 2}, 4, "pp2-dp2"),
        ("tp2-dp2", {"tp": 4, "dp": 1, "world": 4}, 4, "tp4"),
        ("tp2-dp2-sp", {"tp": 1}, 4, "dp4"),
        ("tp2-dp2-sp", {"tp": 4}, 4, "tp4-sp"),
        ("dp4", {"tp": 2, "sp": True}, 4, "tp2-dp2-sp"),
        ("pp2-vpp2-dp2", {"pp": 1}, 4, "dp4"),
        ("pp2-vpp2-dp2", {"pp": 4}, 4, "pp4-vpp2"),
        ("pp2-vpp2-dp2", {"vpp": None}, 4, "pp2-dp2"),
        ("pp2-vpp2-dp2", {"vpp": 1}, 4, "pp2-dp2"),
        ("tp2-dp4-ep2", {"tp": 4}, 8, "tp4-dp2-ep2"),
        ("tp2-dp4-ep2-etp1", {"tp": 4}, 8, "tp4-dp2-ep2-etp1"),
        ("tp2-dp4-ep2-etp1", {"etp": None}, 8, "tp2-dp4-ep2"),
        ("dp4-noopt-mbs2", {"tp": 2}, 4, "tp2-dp2-noopt-mbs2"),
        ("dp4", {"dist_opt": False, "mbs": 4}, 4, "dp4-noopt-mbs4"),
        ("pp2-pipeline:Et|tL", {"tp": 2}, 4, "tp2-pp2-pipeline:Et|tL"),
        ("pp2-pipeline:Et|tL", {"vpp": 1, "tp": 2}, 4, "tp2-pp2-pipeline:Et|tL"),
        ("pp2-pipeline:Et|tL", {"pp": 4}, 4, "pp4"),
        ("pp2-pipeline:Et|tL", {"pp": 1}, 4, "dp4"),
        ("pp2", {"pipeline": "Ett|L"}, 2, "pp2-pipeline:Ett|L"),
        ("tp2-dp2", "pp4", 4, "pp4"),
    ],
)
def test_what_follows_a_change(
    base: str, changes: Mapping[str, object] | str, world: int, wanted: str
) -> None:
    assert str(derive(ParallelLayout.parse(base), changes, world)) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tpp": 2}, "layout key 'tpp' is unknown (did you mean 'tp'?); allowed: tp, pp, vpp, cp"),
        ({3: 2}, "layout key 3 is unknown; allowed: tp"),
        ({"tp": 3}, "tp*pp*cp=3*1*1=3 must divide world=4 (4 mod 3 = 1)"),
        ({"tp": 8}, "tp*pp*cp=8*1*1=8 must divide world=4 (4 mod 8 = 4)"),
        ({"pp": 2, "cp": 4}, "tp*pp*cp=2*2*4=16 must divide world=4 (4 mod 16 = 4)"),
        ({"dp": 4}, "dp=4 must be world / (tp*pp*cp) = 4 / 2 = 2"),
        ({"world": 8}, "world=8 is asked for, but the job has world=4 ranks"),
        ({"world": "4"}, "world must be a whole number of at least 1, got '4'"),
        ({"dp": None}, "dp must be a whole number of at least 1, got None"),
        ({"tp": None}, "tp must be a whole number of at least 1, got None"),
        ({"tp": "two"}, "tp must be a whole number of at least 1, got 'two'"),
        ({"tp": 1, "sp": True}, "sequence parallelism (sp=True) needs tp > 1, but tp=1"),
        ({"pp": 1, "vpp": 2}, "virtual pipelines (vpp=2) need pp > 1, but pp=1"),
    ],
)
def test_a_wrong_change_names_the_rule_and_both_values(
    changes: Mapping[str, object], message: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        derive(ParallelLayout(tp=2, dp=2), changes, 4)
    assert message in str(caught.value)


@pytest.mark.parametrize("wanted", [3, None, ["tp2"], True])
def test_only_texts_and_mappings_describe_a_layout(wanted: object) -> None:
    with pytest.raises(LayoutError, match=r"tp2-pp2-dp2.* or a mapping such as"):
        read_changes(wanted)


def test_every_key_can_be_changed() -> None:
    base = ParallelLayout(tp=2, pp=2, cp=2, dp=4, ep=2)
    changes: dict[str, object] = {
        "tp": 1, "pp": 4, "vpp": 2, "cp": 1, "ep": 4, "etp": 2, "dp": 8, "sp": False,
        "dist_opt": True, "instances": 1, "mbs": 2, "order": "cp-tp-ep-dp-pp",
        "pipeline": "E|t|t|t|t|t|t|L", "world": 32,
    }  # fmt: skip
    assert set(changes) == set(LAYOUT_KEYS)
    got = derive(base, changes, 32)
    assert {key: getattr(got, key) for key in LAYOUT_KEYS} == changes


# ---------------------------------------------------------------- layouts


def test_the_layouts_of_four_ranks() -> None:
    assert [str(layout) for layout in layouts(4)] == [
        "dp4", "pp2-dp2", "pp4", "tp2-dp2", "tp2-pp2", "tp4"
    ]  # fmt: skip


@given(st.integers(1, 96))
def test_layouts_are_all_of_them_once(world: int) -> None:
    wanted = {
        (tp, pp, world // (tp * pp))
        for tp in range(1, world + 1)
        for pp in range(1, world + 1)
        if world % (tp * pp) == 0
    }
    found = layouts(world)
    assert all(layout.world == world for layout in found)
    assert [(one.tp, one.pp, one.dp) for one in found] == sorted(wanted)


def test_other_axes() -> None:
    assert [str(one) for one in layouts(4, ("cp",))] == ["cp4"]
    assert [str(one) for one in layouts(4, ("tp", "ep", "dp"))] == [
        "dp4", "dp4-ep2", "dp4-ep4", "tp2-dp2", "tp2-dp2-ep2", "tp4"
    ]  # fmt: skip
    assert layouts(4, ()) == [] and layouts(1, ()) == [ParallelLayout()]


# ---------------------------------------------------------------- check


LLAMA = ModelShape(
    num_layers=4,
    num_heads=4,
    num_query_groups=2,
    padded_vocab_size=1024,
    global_batch_size=8,
    hidden_size=64,
    ffn_hidden_size=192,
    seq_length=64,
)
EXPERTS = dataclasses.replace(LLAMA, num_experts=4, moe_ffn_hidden_size=96)


@pytest.mark.parametrize("layout", layouts(4))
def test_all_layouts_of_four_ranks_fit_a_small_model(layout: ParallelLayout) -> None:
    layout.check(LLAMA)


@pytest.mark.parametrize(
    ("layout", "model", "message"),
    [
        ("tp3", {}, "tp=3 must divide num_attention_heads=4 (4 mod 3 = 1)"),
        (
            "tp4",
            {"num_heads": 12, "num_query_groups": 6},
            "one of tp=4 and num_query_groups=6 must divide the other (6 mod 4 = 2, 4 mod 6 = 4)",
        ),
        ("tp4", {"ffn_hidden_size": 190}, "tp=4 must divide ffn_hidden_size=190 (190 mod 4 = 2)"),
        (
            "tp4",
            {"padded_vocab_size": 1022},
            "tp=4 must divide padded_vocab_size=1022 (1022 mod 4 = 2), which stays as the launch "
            "has made it; launch with --make-vocab-size-divisible-by a multiple of every tp",
        ),
        (
            "tp4-sp",
            {"seq_length": 66},
            "tp=4 with sequence parallelism must divide seq_length=66 (66 mod 4 = 2)",
        ),
        ("pp3", {}, "pp=3 must divide num_layers=4 (4 mod 3 = 1)"),
        ("pp2-vpp4", {}, "pp*vpp=2*4=8 must divide num_layers=4 (4 mod 8 = 4)"),
        ("cp3", {}, "2*cp=2*3=6 must divide seq_length=64 (64 mod 6 = 4)"),
        ("dp2-ep2", {}, "ep=2 needs a model with experts, but num_experts=None"),
        ("dp3-ep3", {"num_experts": 4}, "ep=3 must divide num_experts=4 (4 mod 3 = 1)"),
        (
            "dp4-ep2-etp2",
            {"num_experts": 4, "moe_ffn_hidden_size": 95},
            "etp=2 must divide moe_ffn_hidden_size=95 (95 mod 2 = 1)",
        ),
        (
            "tp2-dp2",
            {"num_experts": 4},
            "tp=2 with num_experts=4 needs sequence parallelism, but sp=False",
        ),
        ("dp3", {}, "mbs*dp=1*3=3 must divide global_batch_size=8 (8 mod 3 = 2)"),
        ("dp2-mbs8", {}, "mbs*dp=8*2=16 must divide global_batch_size=8 (8 mod 16 = 8)"),
    ],
)
def test_a_layout_wrong_for_a_model_names_the_rule_and_both_values(
    layout: str, model: dict[str, object], message: str
) -> None:
    shape = dataclasses.replace(LLAMA, **model)  # type: ignore[arg-type]
    with pytest.raises(LayoutError) as caught:
        ParallelLayout.parse(layout).check(shape)
    assert str(caught.value) == message


def test_the_first_broken_rule_is_the_one_that_is_named() -> None:
    with pytest.raises(LayoutError, match="num_attention_heads"):
        ParallelLayout(tp=3, pp=3, dp=3).check(LLAMA)
    with pytest.raises(LayoutError, match="num_layers"):
        ParallelLayout(tp=2, pp=3, dp=3).check(LLAMA)


@pytest.mark.parametrize("layout", ["tp4-pp4-sp", "pp2-vpp2", "dp8", "dp2-mbs4", "tp2-cp2"])
def test_layouts_that_fit(layout: str) -> None:
    ParallelLayout.parse(layout).check(LLAMA)


@pytest.mark.parametrize("layout", ["tp2-dp4-ep4-sp", "tp4-ep4-etp1-sp", "dp4-ep2-etp2"])
def test_layouts_that_fit_experts(layout: str) -> None:
    ParallelLayout.parse(layout).check(EXPERTS)


def test_fewer_query_groups_than_tp_are_allowed() -> None:
    ParallelLayout(tp=4).check(dataclasses.replace(LLAMA, num_query_groups=1))
    ParallelLayout(tp=4).check(dataclasses.replace(LLAMA, num_heads=8, num_query_groups=8))


def test_uneven_pipelines_are_left_to_the_host() -> None:
    ParallelLayout(pp=3).check(dataclasses.replace(LLAMA, uneven_pipeline=True))
    ParallelLayout(pp=3, pipeline="Ett|t|tL").check(LLAMA)


def test_sizes_a_model_does_not_have_are_no_rule() -> None:
    ParallelLayout(tp=4, dp=3, sp=True).check(ModelShape(num_layers=1, num_heads=4))
