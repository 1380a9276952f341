"""Overrides that are right, and for each kind of mistake one message that helps."""

import dataclasses
import os
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dynatrain_megatron.config import (
    DynaTrainConfig,
    ElasticConfig,
    EngineConfig,
    EnginePlacement,
    EnginePromote,
    EngineSchedule,
    EngineTransport,
    OnRefusal,
    PlatformChoice,
    ScheduleStep,
    Verify,
    from_json,
    to_json,
)
from dynatrain_megatron.errors import ConfigError, LayoutError
from dynatrain_megatron.layout import LAYOUT_KEYS
from tests.composed import config_of

KEYS = (
    "source", "target", "switch_at", "schedule", "policy", "run_dir", "platform", "topology",
    "on_refusal",
    "engine.schedule", "engine.transport", "engine.placement", "engine.staging_mib",
    "engine.window_ops", "engine.promote", "engine.verify", "engine.keep_source",
    "engine.check_replicas", "engine.timeout_s", "elastic.overlap", "elastic.store",
    "elastic.join", "elastic.on_leave", "elastic.leave_signal", "elastic.connect_timeout_s",
    "elastic.timeout_s", "elastic.cache_worlds", "control.signal", "control.metrics_file",
    "control.metrics_port", "control.metrics_host", "record_steps", "save_before_switch",
    "save_after_switch", "faults",
    "model", "experiment", "cfg",
)  # fmt: skip
GROUP = (
    "a group {schedule: …, transport: …, placement: …, staging_mib: …, window_ops: …, promote: …, "
    "verify: …, keep_source: …, check_replicas: …, timeout_s: …}"
)
TOPOLOGY = "auto, a preset such as h100, the path of a YAML file, or what could be in one"


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(overrides)
    message = str(caught.value)
    assert "\n" not in message and "HYDRA_FULL_ERROR" not in message
    return message


# ---------------------------------------------------------------- what is right


def test_the_defaults() -> None:
    config = config_of([])
    assert config == DynaTrainConfig()
    assert config.steps() == ()
    assert config.platform is PlatformChoice.auto
    assert config.on_refusal is OnRefusal["continue"]
    assert config.engine == EngineConfig(staging_mib=256, window_ops=256, timeout_s=600)
    assert config.engine.schedule is EngineSchedule.direct
    assert config.engine.transport is EngineTransport.auto
    assert config.engine.placement is EnginePlacement.identity
    assert config.engine.verify is Verify.auto
    assert config.engine.check_replicas is False
    assert config.elastic == ElasticConfig(cache_worlds=1)
    assert (config.source, config.run_dir, config.record_steps) == ("auto", "dynatrain-run", True)
    assert config.topology == "auto"


def test_a_schedule() -> None:
    config = config_of(
        ["schedule=[{iteration: 50, layout: {tp: 1, pp: 2, sp: false}}, "
         "{iteration: 60, layout: tp2-pp2}]"]
    )  # fmt: skip
    assert config.steps() == (
        ScheduleStep(50, {"tp": 1, "pp": 2, "sp": False}),
        ScheduleStep(60, "tp2-pp2"),
    )


@pytest.mark.parametrize(
    ("target", "layout"),
    [
        ("tp2-pp2", "tp2-pp2"),
        ("{tp: 2, pp: 2}", {"tp": 2, "pp": 2}),
        ("{vpp: null}", {"vpp": None}),
    ],
)
def test_target_and_switch_at_are_a_schedule_of_one_step(
    target: str, layout: dict[str, object] | str
) -> None:
    assert config_of([f"target={target}", "switch_at=7"]).steps() == (ScheduleStep(7, layout),)


def test_all_keys_at_once() -> None:
    config = config_of(
        [
            "source=tp2-dp2", "target=pp4", "switch_at=3", "policy=my.rules:decide",
            "run_dir=out/run-1", "platform=cpu",
            "on_refusal=fail", "engine.schedule=ring", "engine.transport=vm",
            "engine.placement=best", "topology=cluster.yaml",
            "engine.staging_mib=1", "engine.window_ops=2", "engine.verify=off",
            "engine.promote=off",
            "engine.timeout_s=1.5", "engine.check_replicas=true", "elastic.cache_worlds=0",
            "record_steps=false", "save_after_switch=true",
            "faults=[{rank: 1, phase: wire, kind: kill}]",
        ]
    )  # fmt: skip
    assert config == DynaTrainConfig(
        source="tp2-dp2",
        target="pp4",
        switch_at=3,
        policy="my.rules:decide",
        run_dir="out/run-1",
        platform=PlatformChoice.cpu,
        topology="cluster.yaml",
        on_refusal=OnRefusal.fail,
        engine=EngineConfig(
            schedule=EngineSchedule.ring,
            transport=EngineTransport.vm,
            placement=EnginePlacement.best,
            staging_mib=1,
            window_ops=2,
            promote=EnginePromote.off,
            verify=Verify.off,
            check_replicas=True,
            timeout_s=1.5,
        ),
        elastic=ElasticConfig(cache_worlds=0),
        record_steps=False,
        save_after_switch=True,
        faults=({"rank": 1, "phase": "wire", "kind": "kill"},),
    )


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["run_dir='a, b (c)'"], "run_dir", "a, b (c)"),
        (["run_dir=1"], "run_dir", "1"),
        (["run_dir=a", "run_dir=b"], "run_dir", "b"),
        (["source={tp: 2}"], "source", {"tp": 2}),
        (["target='pp2-pipeline:E(t|)*2'", "switch_at=1"], "target", "pp2-pipeline:E(t|)*2"),
        (["record_steps=no"], "record_steps", False),
        (
            ["engine={verify: off, window_ops: 9}"],
            "engine",
            EngineConfig(window_ops=9, verify=Verify.off),
        ),
        (["engine.timeout_s=3"], "engine", EngineConfig(timeout_s=3.0)),
    ],
)
def test_ways_to_write_a_value(overrides: Sequence[str], key: str, value: object) -> None:
    assert getattr(config_of(overrides), key) == value


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNATRAIN_TEST_JOB", "42")
    config = config_of(["run_dir=out/${oc.env:DYNATRAIN_TEST_JOB}-${engine.window_ops}"])
    assert config.run_dir == "out/42-256"


def test_a_config_is_a_value() -> None:
    config = config_of([])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run_dir = "x"  # type: ignore[misc]


def test_a_hydra_application_around_us_is_left_alone() -> None:
    from hydra import initialize
    from hydra.core.global_hydra import GlobalHydra

    with initialize(version_base=None, config_path=None, job_name="outer"):
        outer = GlobalHydra.instance().hydra
        config_of(["run_dir=x"])
        assert GlobalHydra.instance().hydra is outer
        refused("run_dir=${nothing}")
        assert GlobalHydra.instance().hydra is outer
    config_of(["run_dir=x"])


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("swich_at=3", "'switch_at'"),
        ("platfrom=cpu", "'platform'"),
        ("rundir=x", "'run_dir'"),
        ("staging_mib=3", "'engine.staging_mib'"),
        ("engine.stagingmib=3", "'staging_mib'"),
        ("engine={verfy: off}", "'verify'"),
    ],
)
def test_an_unknown_key_gets_the_nearest_and_all_keys(override: str, nearest: str) -> None:
    message = refused(override)
    assert f"did you mean {nearest}?" in message
    assert override.partition("=")[2].strip("{}").rpartition(" ")[2] in message
    assert message.endswith(f"keys: {', '.join(KEYS)}")


@pytest.mark.parametrize(
    "override", ["zzz=3", "hydra.run.dir=x", "hydra/launcher=basic", "defaults=[a]", "=3", "a=1"]
)
def test_keys_that_resemble_nothing_get_all_keys(override: str) -> None:
    message = refused(override)
    assert repr(override.partition("=")[0]) in message
    assert message.endswith(f"keys: {', '.join(KEYS)}")


def test_a_key_inside_a_value_says_how_to_write_the_value() -> None:
    message = refused("target.tp=2")
    assert "'target.tp' is unknown: target is one value, a layout such as tp2-pp2" in message


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("switch_at=soon", "a whole number of at least 1, or null"),
        ("switch_at=1.5", "a whole number of at least 1, or null"),
        ("switch_at=true", "a whole number of at least 1, or null"),
        ("switch_at=[1]", "a whole number of at least 1, or null"),
        ("run_dir=''", "a path"),
        ("run_dir=null", "a path"),
        ("run_dir=[a, b]", "a path"),
        ("run_dir={a: 1}", "a path"),
        ("run_dir=???", "a path"),
        ("run_dir=${nothing}", "a path"),
        ("run_dir=${run_dir}", "a path"),
        ("run_dir=${oc.env:DYNATRAIN_TEST_UNSET}", "a path"),
        ("platform=gpu", "auto, cuda or cpu"),
        ("platform=CPU", "auto, cuda or cpu"),
        ("platform=null", "auto, cuda or cpu"),
        ("on_refusal=stop", "continue or fail"),
        ("engine.schedule=tree", "direct, xor, ring or auto"),
        ("policy=follow_capacity", "package.module:function, or null"),
        ("policy=my rules:decide", "package.module:function, or null"),
        ("policy=a.b:f-1", "package.module:function, or null"),
        ("policy=a/b.py:f", "package.module:function, or null"),
        ("policy=''", "package.module:function, or null"),
        ("policy={a: b}", "package.module:function, or null"),
        ("topology=null", TOPOLOGY),
        ("topology=''", TOPOLOGY),
        ("topology=[a]", TOPOLOGY),
        ("topology={}", TOPOLOGY),
        ("engine.placement=worst", "best or identity"),
        ("engine.transport=gloo", "auto, vm, memfd or torch"),
        ("engine.verify=wire", "auto, off, messages or fingerprint"),
        ("engine.verify=true", "auto, off, messages or fingerprint"),
        ("engine.staging_mib=0", "a whole number of at least 1 (MiB)"),
        ("engine.staging_mib=0.5", "a whole number of at least 1 (MiB)"),
        ("engine.window_ops=-1", "a whole number of at least 1"),
        ("engine.window_ops=null", "a whole number of at least 1"),
        ("engine.timeout_s=soon", "a number above 0 (seconds)"),
        ("engine.timeout_s=nan", "a number above 0 (seconds)"),
        ("engine.timeout_s=inf", "a number above 0 (seconds)"),
        ("engine.check_replicas=maybe", "true or false"),
        ("elastic.cache_worlds=-1", "a whole number of at least 0"),
        ("elastic.overlap=on", "auto, thread, boundary or off"),
        ("elastic.store=node7", "auto, or HOST:PORT"),
        ("elastic.join=node7:99999", "HOST:PORT of a job's store, or null"),
        ("elastic.on_leave=die", "exit or park"),
        (
            "elastic.leave_signal=SIGKILL",
            "one of SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT, or null",
        ),
        ("elastic.timeout_s=0.0", "a number above 0 (seconds)"),
        ("elastic.cache_worlds=all", "a whole number of at least 0"),
        ("control.signal=SIGKILL", "one of SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT, or null"),
        ("control.metrics_port=0", "a port, or null"),
        ("control.metrics_port=99999", "a port, or null"),
        ("control.metrics_file=''", "a path, or null"),
        ("record_steps=maybe", "true or false"),
        ("record_steps=null", "true or false"),
        ("schedule=5", "a list such as [{iteration: 50, layout: {tp: 1, pp: 2}}]"),
        ("schedule=null", "a list such as [{iteration: 50, layout: {tp: 1, pp: 2}}]"),
        ("schedule={iteration: 5}", "a list such as [{iteration: 50, layout: {tp: 1, pp: 2}}]"),
        ("engine=5", GROUP),
        ("engine=null", GROUP),
    ],
)
def test_a_wrong_value_gets_key_value_and_what_is_allowed(override: str, allowed: str) -> None:
    key = override.partition("=")[0]
    assert refused(override) == f"{override} is not allowed; {key} must be {allowed}"


def test_the_wrong_one_of_several_is_named() -> None:
    message = refused("run_dir=x", "engine={verify: off, staging_mib: lots}", "platform=cpu")
    assert message.startswith("engine.staging_mib=lots is not allowed; engine.staging_mib must be")


@pytest.mark.parametrize(
    "override",
    [
        "schedule=[{iteration: 50, layout: {tp: 1, pp: 2}]",
        "schedule=[{iteration: 50, layout: {tp: 1, pp: 2}}",
        "schedule=[{iteration: 50,",
        "run_dir='a",
        "switch_at",
        "a b=c",
        "",
    ],
)
def test_what_cannot_be_read_is_shown_with_an_example(override: str) -> None:
    message = refused(override)
    assert message.startswith(f"override {override or repr(override)} cannot be read: ")
    assert message.endswith("for example 'schedule=[{iteration: 50, layout: {tp: 1, pp: 2}}]'")


@pytest.mark.parametrize("override", ["+switch_at=3", "++switch_at=3", "~run_dir", "run_dir@x=3"])
def test_only_plain_assignments_are_taken(override: str) -> None:
    message = refused(override)
    assert message.startswith(f"override {override} is not of the form key=value; keys: source,")


@pytest.mark.parametrize("value", ["1,2", "choice(1,2)", "range(1,3)"])
def test_several_values_are_refused(value: str) -> None:
    message = refused(f"switch_at={value}")
    assert message.startswith(
        f"switch_at={value} gives switch_at several values; switch_at must be"
    )


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("5", "schedule[0]=5 is not allowed; it must be like {iteration: 50,"),
        (
            "{iteration: 5}",
            "schedule[0]={iteration: 5} lacks layout; it must be like {iteration: 50",
        ),
        ("{layout: tp2}", "schedule[0]={layout: tp2} lacks iteration; it must be like"),
        (
            "{iteration: 5, layot: tp2}",
            "key 'schedule[0].layot' is unknown (did you mean 'layout'?); got tp2; "
            "keys: iteration, layout",
        ),
        (
            "{iteration: 0, layout: tp2}",
            "schedule[0].iteration=0 is not allowed; schedule[0].iteration must be "
            "a whole number of at least 1",
        ),
        ("{iteration: soon, layout: tp2}", "schedule[0].iteration=soon is not allowed"),
        ("{iteration: '2', layout: tp2}", "schedule[0].iteration='2' is not allowed"),
        ("{iteration: true, layout: tp2}", "schedule[0].iteration=true is not allowed"),
        (
            "{iteration: 9, layout: tp2}, {iteration: 8, layout: tp4}",
            "schedule[1].iteration=8 must be above schedule[0].iteration=9",
        ),
        (
            "{iteration: 2, layout: pp2}, {iteration: 9, layout: tp2}, {iteration: 9, layout: tp4}",
            "schedule[2].iteration=9 must be above schedule[1].iteration=9",
        ),
        (
            "{iteration: 5, layout: {tpp: 2}}",
            "schedule[0].layout={tpp: 2} is not a layout: layout key 'tpp' is unknown "
            f"(did you mean 'tp'?); allowed: {', '.join(LAYOUT_KEYS)}",
        ),
        (
            "{iteration: 5, layout: {tp: two}}",
            "schedule[0].layout={tp: two} is not a layout: tp must be a whole number of "
            "at least 1, got 'two'",
        ),
        (
            "{iteration: 5, layout: tp2xx}",
            "schedule[0].layout=tp2xx is not a layout: layout 'tp2xx' has a part 'tp2xx' that is "
            "unknown",
        ),
        (
            "{iteration: 5, layout: null}",
            "schedule[0].layout=null is not a layout: a layout is a text",
        ),
        ("{iteration: 5, layout: 4}", "schedule[0].layout=4 is not a layout: a layout is a text"),
    ],
)
def test_a_wrong_schedule_names_the_step_and_the_value(steps: str, message: str) -> None:
    assert refused(f"schedule=[{steps}]").startswith(message)


def test_a_layout_mistake_keeps_its_cause() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(["source={tp: 0}"])
    assert isinstance(caught.value.__cause__, LayoutError)


def test_target_and_switch_at_need_each_other() -> None:
    assert refused("target=tp2").startswith(
        "target and switch_at need each other, but target=tp2 and switch_at=null"
    )
    assert refused("switch_at=5").startswith(
        "target and switch_at need each other, but target=null and switch_at=5"
    )


@pytest.mark.parametrize("extra", [["target=tp2", "switch_at=5"], ["target=tp2"], ["switch_at=5"]])
def test_target_and_schedule_exclude_each_other(extra: list[str]) -> None:
    message = refused("schedule=[{iteration: 5, layout: tp2}]", *extra)
    assert message.startswith("schedule and target or switch_at exclude each other, but schedule")
    assert all(text in message for text in extra)


@pytest.mark.parametrize("override", ["target=tp0", "target=", "target={sp: 1}", "target=[tp2]"])
def test_a_wrong_target(override: str) -> None:
    assert refused(override, "switch_at=5").startswith("target=")


@pytest.mark.parametrize(
    "override", ["source=tp2-tp4", "source=automatic", "source=null", "source="]
)
def test_a_wrong_source(override: str) -> None:
    assert " is not a layout: " in refused(override)


def test_long_values_are_shortened() -> None:
    assert len(refused("platform=" + "x" * 10_000)) < 500
    assert len(refused("[" * 3_000)) < 1_000


def test_wrong_values_made_in_python_are_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"engine.window_ops=0 is not allowed"):
        EngineConfig(window_ops=0)
    with pytest.raises(ConfigError, match=r"run_dir=.* is not allowed"):
        DynaTrainConfig(run_dir="a\0b")


def test_the_exit_code_of_a_wrong_command_line() -> None:
    assert ConfigError("x").exit_code == 2


# ---------------------------------------------------------------- anything at all

PLAUSIBLE = st.builds(
    "{}{}={}".format,
    st.sampled_from(["", "", "", "", "+", "~"]),
    st.sampled_from([*KEYS, "engine", "swich_at", "engine.x", "schedule[0]", "target.tp"]),
    st.sampled_from(
        ["1", "-1", "0.5", "true", "null", "tp2", "{tp: 2}", "[{iteration: 1, layout: tp2}]", "[]",
         "{}", "auto", "cpu", "off", "${source}", "${run_dir}", "${oc.env:HOME,x}", "???", "a,b",
         "'q'", "1e999", "{a: {b: [1]}}", "[{iteration: 1}]", "${", "int(3)", "inf"]
    ),
)  # fmt: skip
HOSTILE = st.text("={}[]()'\"$.,:~+@/*\\ \n\tabc01tp", max_size=25) | st.text(max_size=25)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PLAUSIBLE | HOSTILE, max_size=3))
@example(["x=" + "[" * 3_000])
@example(["switch_at=" + "9" * 5_000])
@example(["run_dir=${source}", "source=${run_dir}"])
@example(["target=${switch_at}", "switch_at=${target}"])
@example(["schedule=[${schedule}]"])
@example(["run_dir=a\\"])
def test_any_overrides_compose_or_give_one_config_error(overrides: list[str]) -> None:
    environment = dict(os.environ)
    try:
        config = config_of(overrides)
    except ConfigError as error:
        assert str(error) and "Traceback" not in str(error)
    else:
        assert isinstance(config, DynaTrainConfig)
        assert all(isinstance(step, ScheduleStep) for step in config.steps())
    assert dict(os.environ) == environment


def test_a_configuration_goes_to_another_process_as_it_is() -> None:
    config = config_of(
        [
            "schedule=[{iteration: 5, layout: {tp: 1, vpp: null}}, {iteration: 6, layout: pp4}]",
            "engine.schedule=ring", "elastic.join=node7:29500", "elastic.leave_signal=null",
            "control.metrics_port=9400",
        ]
    )  # fmt: skip
    assert from_json(to_json(config)) == config
