"""Presets: every one composes, choices and values go together as Hydra users expect."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dynatrain_megatron.ahead.cases import read_cases, read_layout, topology_of
from dynatrain_megatron.config import (
    DynaTrainConfig,
    KeepSource,
    compose,
    compose_ahead,
)
from dynatrain_megatron.errors import ConfigError, LayoutError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import read_topology_file
from dynatrain_megatron.plugin.entry import prepare
from dynatrain_megatron.presets import FOLDER, Presets, take_config_dir
from dynatrain_megatron.shapes import MODELS, read_model
from tests.composed import config_of

OURS = Presets()


def refused(*overrides: str, own: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(overrides, own)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's folder."""
    for name, text in {
        "topology/mine": "{ranks_per_node: 4, speeds: {far_gb_s: 12}}",
        "topology/h100": "{ranks_per_node: 2}",
        "layout/wide": "{tp: 4, pp: 2}",
        "engine/careful": "{keep_source: always, check_replicas: true}",
        "experiment/night": "# @package _global_\ndefaults:\n  - override /topology: mine\n"
        "target: wide\nswitch_at: 7\nengine: {window_ops: 9}\n",
        "experiment/typo": "# @package _global_\nswich_at: 3\n",
        "experiment/wrong": "# @package _global_\nengine: {window_ops: lots}\n",
        "experiment/broken": "# @package _global_\nengine: {window_ops: [\n",
        "experiment/lost": "# @package _global_\ndefaults:\n  - override /topology: nowhere\n",
        "layout/list": "[1, 2]",
    }.items():
        path = tmp_path / "my presets, 'all'" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "my presets, 'all'"


# ---------------------------------------------------------------- ours


@pytest.mark.parametrize("name", OURS.names("model"))
def test_every_model_composes(name: str) -> None:
    config = compose_ahead([f"model={name}"]).config
    assert read_model(config.model).numel > 10**9


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3_1_3b", 1.3), ("gpt3_175b", 174.6), ("llama2_7b", 6.7), ("llama2_13b", 13.0),
        ("llama2_70b", 69.0), ("qwen3_30b_a3b", 30.5), ("qwen3_235b_a22b", 235.1),
        ("deepseek_v3", 671.0),
    ],
)  # fmt: skip
def test_models_have_their_published_sizes(name: str, billions: float) -> None:
    model = read_model(compose_ahead([f"model={name}"]).config.model)
    assert round(model.numel / 1e9, 1) == billions
    known = {"llama2_7b": "7B", "llama2_13b": "13B", "llama2_70b": "70B",
             "qwen3_235b_a22b": "235B", "deepseek_v3": "671B"}  # fmt: skip
    if name in known:
        assert model == MODELS[known[name]]


def test_the_list_of_models_is_whole() -> None:
    assert len(OURS.names("model")) == 8


@pytest.mark.parametrize("name", OURS.names("topology"))
def test_every_topology_composes(name: str) -> None:
    topology = topology_of(read_topology_file(config_of([f"topology={name}"]).topology), 16)
    assert topology.node == (0,) * 8 + (1,) * 8
    assert topology.speeds.near_gb_s > topology.speeds.far_gb_s


@pytest.mark.parametrize("name", OURS.names("layout"))
def test_every_layout_composes_wherever_a_layout_may_stand(name: str) -> None:
    config = config_of([f"source={name}", f"schedule=[{{iteration: 3, layout: {name}}}]"])
    (step,) = config.steps()
    assert (
        step.layout_changes == config.source == config_of([f"target={name}", "switch_at=1"]).target
    )
    layout = read_layout(config.source, ParallelLayout(dp=128))
    assert layout.world == 128
    with pytest.raises(LayoutError):  # or the name would hide a layout's own text
        ParallelLayout.parse(name)


@pytest.mark.parametrize("name", OURS.names("experiment"))
def test_every_experiment_composes_and_can_be_planned(name: str) -> None:
    config = config_of([f"experiment={name}"])
    assert config != DynaTrainConfig()
    if config.steps():
        ahead = compose_ahead([f"experiment={name}", "model=llama2_70b", "source=tp8-pp4-dp4"])
        assert len(read_cases(ahead.config)) == len(config.steps())


# ---------------------------------------------------------------- together


def test_values_win_over_presets_in_any_order() -> None:
    for overrides in (
        ["experiment=spot_elastic", "engine.keep_source=never"],
        ["engine.keep_source=never", "experiment=spot_elastic"],
    ):
        config = config_of(overrides)
        assert config.engine.keep_source is KeepSource.never
        assert config.engine.check_replicas and config.save_after_switch
    config = config_of(["topology.speeds.far_gb_s=40", "topology=h100", "topology.node_width=4"])
    assert config.topology["speeds"] == {"near_gb_s": 450, "far_gb_s": 40, "operation_s": 20e-6}
    assert config.topology["node_width"] == 4
    model = compose_ahead(["model=llama2_7b", "model.num_layers=2"]).config.model
    assert (model["num_layers"], model["hidden"]) == (2, 4096)
    for overrides in (["topology.node_width=4"], ["topology=auto", "topology.node_width=4"]):
        assert config_of(overrides).topology == {"node_width": 4}
    for overrides in (
        ["topology.node_width=4", "topology=rack.yaml"],
        ["topology=rack.yaml", "topology.node_width=4"],
    ):
        assert "topology.node_width=4 sets one value of a mapping" in refused(*overrides)


@pytest.mark.parametrize(
    ("overrides", "topology"),
    [
        (["topology=h100", "topology=auto"], "auto"),
        (["topology=h100", "topology=rack.yaml"], "rack.yaml"),
        (["topology={node_width: 4}", "topology=rack.yaml"], "rack.yaml"),
        (["topology=rack.yaml", "topology={node_width: 2}"], {"node_width": 2}),
        (["topology={node_width: 2}"], {"node_width": 2}),
        (["topology=${run_dir}.yaml", "run_dir=x"], "x.yaml"),
    ],
)
def test_of_two_choices_the_later_one_counts(overrides: list[str], topology: object) -> None:
    assert config_of(overrides).topology == topology


def test_a_preset_after_a_value_counts() -> None:
    assert config_of(["topology=rack.yaml", "topology=h100"]) == config_of(["topology=h100"])
    assert config_of(["topology=a800", "topology=h100"]) == config_of(["topology=h100"])


def test_presets_of_the_users_own(own: Path) -> None:
    config = config_of(["experiment=night", "engine.staging_mib=5"], own)
    assert config.topology == {"ranks_per_node": 4, "speeds": {"far_gb_s": 12}}
    assert (config.target, config.switch_at) == ({"tp": 4, "pp": 2}, 7)
    assert (config.engine.window_ops, config.engine.staging_mib) == (9, 5)
    # What is chosen on the command line wins over what a bundle chooses; theirs goes before ours.
    assert config_of(["experiment=night", "topology=h100"], own).topology == {"ranks_per_node": 2}
    assert config_of(["experiment=night", "topology=h200"], own).topology["ranks_per_node"] == 8
    assert config_of(["experiment=night", "target=tp8"], own).target == "tp8"
    config = config_of(["engine=careful", "engine.window_ops=3"], own)
    assert config.engine.check_replicas and config.engine.keep_source is KeepSource.always
    assert config.engine.window_ops == 3
    assert config_of(["experiment=spot_elastic"], own).save_after_switch


def test_the_configuration_is_shown_with_everything_resolved(own: Path) -> None:
    import yaml

    composed = compose(["cfg=job", "experiment=night", "run_dir=x-${switch_at}"], own)
    shown = yaml.safe_load(composed.text)
    assert shown["run_dir"] == composed.config.run_dir == "x-7"
    assert shown["target"] == {"tp": 4, "pp": 2} and shown["engine"]["schedule"] == "direct"
    assert config_of([f"run_dir={shown['run_dir']}"]).run_dir == "x-7"


def test_a_job_that_shows_its_configuration_ends_there(
    capsys: pytest.CaptureFixture[str], own: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        prepare(["--bf16", "--dynatrain", "cfg=job", "experiment=night",
                 "--dynatrain-config-dir", str(own)])  # fmt: skip
    assert caught.value.code == 0
    assert "switch_at: 7" in capsys.readouterr().out


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "experiment=rlhf",
            "experiment=rlhf is no preset (did you mean 'rlhf_phases'?); presets: ",
        ),
        ("experiment=[a,b]", "experiment=[a, b] is no preset"),
        ("experiment={a: 1}", "experiment={a: 1} is no preset"),
        ("experiment=../../x", "experiment=../../x is no preset"),
        ("cfg=hydra", "cfg=hydra is not allowed; cfg must be job"),
        ("layout=tensor", "key 'layout' is unknown"),
        ("model=llama2_7b", "model is for dynatrain plan and dynatrain simulate"),
        ("engine=careful", "engine=careful is not allowed"),
    ],
)
def test_a_wrong_choice_says_what_there_is(override: str, told: str) -> None:
    assert told in refused(override)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("experiment=typo", "swich_at"),
        ("experiment=wrong", "window_ops"),
        ("experiment=broken", "experiment=broken cannot be composed: "),
        ("experiment=lost", "experiment=lost cannot be composed: "),
        ("source=list", "source=list cannot be composed: "),
    ],
)
def test_a_wrong_file_is_named_with_its_key(override: str, told: str, own: Path) -> None:
    assert told in refused(override, own=own)
    assert override in refused(override, own=own)


def test_the_folder_must_be_one(tmp_path: Path) -> None:
    assert "is not a folder" in refused(own=tmp_path / "nowhere")
    for argv, told in (
        (["--dynatrain-config-dir"], "names no folder"),
        (["--dynatrain-config-dir", "--bf16"], "names no folder"),
        (["--dynatrain-config-dir=a", "--dynatrain-config-dir", "b"], "is given twice"),
    ):
        with pytest.raises(ConfigError, match=told):
            take_config_dir(argv)
    assert take_config_dir(["--x", "--dynatrain-config-dir=a b", "y"]) == (
        ["--x", "y"],
        Path("a b"),
    )
    with pytest.raises(ConfigError, match="needs --dynatrain"):
        prepare(["--bf16", "--dynatrain-config-dir", str(tmp_path)])


def test_the_wheel_carries_them(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    root = FOLDER.parents[1]
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    run = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False, cwd=root,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    carried = set(zipfile.ZipFile(wheel).namelist())
    files = {str(path.relative_to(root)) for path in FOLDER.rglob("*.yaml")}
    assert len(files) > 15 and files <= carried
