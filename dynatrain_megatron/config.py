"""The configuration behind ``--dynatrain``: its schema, and how overrides become one.

:func:`split_argv` takes our part out of a command line, :func:`compose` turns Hydra overrides into
a checked :class:`DynaTrainConfig`. Neither torch nor Megatron is imported, so that a mistake is
found before anything is started. Every mistake a user can make is one ConfigError that names the
key, the value and what is allowed. Presets (:mod:`dynatrain_megatron.presets`) are Hydra's config
groups: ``topology=h100 experiment=rlhf_phases`` take files, and values win over what is in them.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from dynatrain_megatron.errors import SHOWN_CHARS, ConfigError, LayoutError, did_you_mean
from dynatrain_megatron.faults import Fault, Kind, Phase
from dynatrain_megatron.layout import read_changes
from dynatrain_megatron.presets import PACKAGE, Presets

FLAG = "--dynatrain"
_EXAMPLE = "{iteration: 50, layout: {tp: 1, pp: 2}}"
_NAME = r"[A-Za-z_][A-Za-z_0-9]*"
_FUNCTION = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*")
_FAULT_EXAMPLE = "{rank: 1, phase: wire, kind: kill}"


class PlatformChoice(StrEnum):
    """Which device platform to run on; ``auto`` takes CUDA where there is a device."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


# ``continue`` is a Python keyword, which a class body cannot have as a name.
OnRefusal = StrEnum("OnRefusal", {"continue": "continue", "fail": "fail"})
OnRefusal.__doc__ = "What a job does when a switch is refused: go on in its layout, or end."


class EngineSchedule(StrEnum):
    """How transfers are ordered.

    ``direct`` starts all as early as bounded windows allow. ``xor`` and ``ring`` pair ranks off
    in rounds, of which there are fewest with ``ring`` unless the number of ranks is a power of two.
    ``auto`` takes what is predicted to be fastest.
    """

    direct = "direct"
    xor = "xor"
    ring = "ring"
    auto = "auto"


class EnginePromote(StrEnum):
    """Whether what several ranks of a node lack is relayed: scattered, then gathered by them all.

    ``auto``: where that is predicted to be faster. ``off``: every rank gets all from its holders.
    """

    auto = "auto"
    off = "off"


class EngineTransport(StrEnum):
    """How bytes get from rank to rank.

    ``torch``: through torch.distributed. Between ranks of one host, where the state is in host
    memory, also ``vm``: they read each other's memory; ``memfd``: they share rings of memory, which
    takes no permission to trace. ``auto``: the first that works of ``vm``, ``memfd``, ``torch``.
    """

    auto = "auto"
    vm = "vm"
    memfd = "memfd"
    torch = "torch"


class EnginePlacement(StrEnum):
    """Which process takes which rank of the target.

    ``identity``: every process keeps its rank. ``best``: the order that moves the fewest bytes,
    groups staying within their nodes.
    """

    best = "best"
    identity = "identity"


class Overlap(StrEnum):
    """When the target's world is built.

    ``thread``: in the background, while training goes on. ``boundary``: a few groups at each of the
    step boundaries before, while training waits. ``off``: all of it while the switch stops the job.
    ``auto``: ``thread`` with gloo; ``boundary`` with NCCL, of which two communicators of one device
    must not be used at a time.
    """

    auto = "auto"
    thread = "thread"
    boundary = "boundary"
    off = "off"

    def on(self, backend: str) -> "Overlap":
        """What ``auto`` means over ``backend``."""
        if self is not Overlap.auto:
            return self
        return Overlap.thread if backend == "gloo" else Overlap.boundary


class OnLeave(StrEnum):
    """What a process does that has left the job: end, or wait to be taken in again."""

    exit = "exit"
    park = "park"


class Verify(StrEnum):
    """How moved state is verified before it is used.

    ``messages``: the receiver of each message compares its checksum with the sender's.
    ``fingerprint``: the bits of all that a rank holds afterwards are compared with their sources',
    what it kept too, and the whole state with the whole. ``auto``: ``fingerprint`` on CUDA, where
    memory is fast, and ``messages`` elsewhere.
    """

    auto = "auto"
    off = "off"
    messages = "messages"
    fingerprint = "fingerprint"

    def on(self, device_type: str) -> "Verify":
        """What ``auto`` means for state on a device of this type; all else means itself."""
        if self is not Verify.auto:
            return self
        return Verify.fingerprint if device_type == "cuda" else Verify.messages


class KeepSource(StrEnum):
    """What becomes of the old state while the new one is filled.

    ``always``: it stays until the switch is done, so that a failure goes back to it. ``never``: it
    is freed part by part, as soon as all readers have verified theirs; a failure after that ends
    the job. ``auto``: ``always`` where every rank has the memory, ``never`` elsewhere.
    """

    always = "always"
    never = "never"
    auto = "auto"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How state is moved: the group ``engine``."""

    schedule: EngineSchedule = EngineSchedule.direct
    transport: EngineTransport = EngineTransport.auto
    placement: EnginePlacement = EnginePlacement.identity
    staging_mib: int = 256
    """Upper limit of staging memory a rank, MiB."""
    window_ops: int = 256
    """Most sends and receives of a rank in one window; two windows are under way at a time."""
    promote: EnginePromote = EnginePromote.auto
    verify: Verify = Verify.auto
    keep_source: KeepSource = KeepSource.auto
    check_replicas: bool = False
    """Whether what several ranks hold is compared first; a switch is refused where it differs."""
    timeout_s: float = 600.0
    """Deadline of every wait while a switch is under way, seconds."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        for name in ("staging_mib", "window_ops"):
            _check_count(f"engine.{name}", getattr(self, name))
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            _refuse("engine.timeout_s", self.timeout_s)


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """Who belongs to a job, and what is kept of its worlds: the group ``elastic``."""

    overlap: Overlap = Overlap.auto
    store: str = "auto"
    """``auto``: the store that the launcher gave; or HOST:PORT of one that outlives all ranks."""
    join: str | None = None
    """HOST:PORT of the store of a running job that this process is to join."""
    on_leave: OnLeave = OnLeave.exit
    leave_signal: str | None = "SIGTERM"
    """The signal that tells a process to leave; null for none."""
    cache_worlds: int = 1
    """Layouts kept beside the one in force: process groups and model objects, without memory."""
    connect_timeout_s: float = 30.0
    """How long processes may take to connect to each other, seconds."""
    timeout_s: float = 120.0
    """How long a switch may take to be prepared, decided, or given up, seconds."""

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if type(self.cache_worlds) is not int or self.cache_worlds < 0:
            _refuse("elastic.cache_worlds", self.cache_worlds)
        for name in ("connect_timeout_s", "timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                _refuse(f"elastic.{name}", value)
        if self.store != "auto" and not is_address(self.store):
            _refuse("elastic.store", self.store)
        if self.join is not None and not is_address(self.join):
            _refuse("elastic.join", self.join)
        if self.leave_signal is not None and self.leave_signal not in _SIGNALS:
            _refuse("elastic.leave_signal", self.leave_signal)


_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT")


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """How a job is asked and watched from outside: the group ``control``."""

    signal: str | None = "SIGUSR1"
    """The signal that makes a process read the run directory's request; null for none."""
    metrics_file: str | None = None
    """Where Prometheus' text goes, for a textfile collector; relative to the run directory."""
    metrics_port: int | None = None
    """The port at which the process of rank 0 serves the same text; null for none."""
    metrics_host: str = "127.0.0.1"
    """The address of that port."""

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.signal is not None and self.signal not in _SIGNALS:
            _refuse("control.signal", self.signal)
        if self.metrics_file is not None and (not self.metrics_file or "\0" in self.metrics_file):
            _refuse("control.metrics_file", self.metrics_file)
        port = self.metrics_port
        if port is not None and not (type(port) is int and 0 < port < 1 << 16):
            _refuse("control.metrics_port", port)
        if not self.metrics_host or "\0" in self.metrics_host:
            _refuse("control.metrics_host", self.metrics_host)


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and len(port) < 6 and 0 < int(port) < 1 << 16


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """One planned switch, at the first step boundary at or after ``iteration`` (1 or more).

    ``layout_changes`` is what :func:`dynatrain_megatron.layout.derive` takes.
    """

    iteration: int
    layout_changes: dict[str, object] | str


@dataclass(frozen=True, slots=True)
class DynaTrainConfig:
    """All settings of one job. Raises ConfigError where values are wrong or contradict each other.

    ``target`` with ``switch_at`` is the short way to write a schedule of one step. Layouts are
    texts such as ``tp2-pp2`` or mappings such as ``{tp: 2, pp: 2}``.
    """

    source: Any = "auto"
    target: Any = None
    switch_at: int | None = None
    schedule: tuple[Any, ...] = ()
    policy: str | None = None
    """``package.module:function``: see :mod:`dynatrain_megatron.policies`. The schedule goes first:
    a policy is asked where no step of it is due."""
    run_dir: str = "dynatrain-run"
    platform: PlatformChoice = PlatformChoice.auto
    topology: Any = "auto"
    """``auto``, a YAML file, or what could be in one as a mapping; see
    :mod:`dynatrain_megatron.planner.topology_file`."""
    on_refusal: OnRefusal = OnRefusal["continue"]
    engine: EngineConfig = field(default_factory=EngineConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    record_steps: bool = True
    save_before_switch: bool = False
    """Whether each switch is preceded by a checkpoint in the old layout, with Megatron's --save."""
    save_after_switch: bool = False
    """Whether each switch is followed by a checkpoint in the new layout, with Megatron's --save."""
    faults: tuple[Any, ...] = ()
    """What is made to fail on purpose: see :mod:`dynatrain_megatron.faults`."""
    model: Any = None
    """Sizes of a model, to plan without a job; see :func:`compose_ahead`."""

    def __post_init__(self) -> None:
        """Check each value, then what they mean together."""
        if self.source != "auto":
            _check_layout("source", self.source)
        if self.policy is not None and not _FUNCTION.fullmatch(self.policy):
            _refuse("policy", self.policy)
        if not self.run_dir or "\0" in self.run_dir:
            _refuse("run_dir", self.run_dir)
        if not isinstance(self.topology, str | Mapping) or not self.topology:
            _refuse("topology", self.topology)
        if isinstance(self.topology, str) and "\0" in self.topology:
            _refuse("topology", self.topology)
        self.steps()
        self.planned_faults()

    def steps(self) -> tuple[ScheduleStep, ...]:
        """The planned switches in order; ``target`` and ``switch_at`` are one of them."""
        if self.target is None and self.switch_at is None:
            return tuple(_schedule_steps(self.schedule))
        if self.schedule:
            raise ConfigError(
                f"schedule and target or switch_at exclude each other, but schedule has "
                f"{len(self.schedule)} step(s), target={_show(self.target)} and "
                f"switch_at={_show(self.switch_at)}; write all switches into schedule"
            )
        if self.target is None or self.switch_at is None:
            raise ConfigError(
                f"target and switch_at need each other, but target={_show(self.target)} and "
                f"switch_at={_show(self.switch_at)}; set both or neither"
            )
        _check_count("switch_at", self.switch_at)
        _check_layout("target", self.target)
        return (ScheduleStep(self.switch_at, self.target),)

    def planned_faults(self) -> tuple[Fault, ...]:
        """The faults to be made on purpose."""
        return tuple(_fault(f"faults[{i}]", entry) for i, entry in enumerate(self.faults))


def _one_of(choices: type[StrEnum]) -> str:
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else str(last)


_LAYOUT = "a layout such as tp2-pp2 or {tp: 2, pp: 2}"
_COUNT = "a whole number of at least 1"
# What may be written for each key; the keys are also the list of all keys there are.
_ALLOWED = {
    "source": f"auto, or {_LAYOUT}",
    "target": f"{_LAYOUT}, or null",
    "switch_at": f"{_COUNT}, or null",
    "schedule": f"a list such as [{_EXAMPLE}]",
    "policy": "package.module:function, or null",
    "run_dir": "a path",
    "platform": _one_of(PlatformChoice),
    "topology": "auto, a preset such as h100, the path of a YAML file, or what could be in one",
    "on_refusal": _one_of(OnRefusal),
    "engine.schedule": _one_of(EngineSchedule),
    "engine.transport": _one_of(EngineTransport),
    "engine.placement": _one_of(EnginePlacement),
    "engine.staging_mib": f"{_COUNT} (MiB)",
    "engine.window_ops": _COUNT,
    "engine.promote": _one_of(EnginePromote),
    "engine.verify": _one_of(Verify),
    "engine.keep_source": _one_of(KeepSource),
    "engine.check_replicas": "true or false",
    "engine.timeout_s": "a number above 0 (seconds)",
    "elastic.overlap": _one_of(Overlap),
    "elastic.store": "auto, or HOST:PORT",
    "elastic.join": "HOST:PORT of a job's store, or null",
    "elastic.on_leave": _one_of(OnLeave),
    "elastic.leave_signal": f"one of {', '.join(_SIGNALS)}, or null",
    "elastic.connect_timeout_s": "a number above 0 (seconds)",
    "elastic.timeout_s": "a number above 0 (seconds)",
    "elastic.cache_worlds": "a whole number of at least 0",
    "control.signal": f"one of {', '.join(_SIGNALS)}, or null",
    "control.metrics_file": "a path, or null",
    "control.metrics_port": "a port, or null",
    "control.metrics_host": "an address of this machine, such as 127.0.0.1",
    "record_steps": "true or false",
    "save_before_switch": "true or false",
    "save_after_switch": "true or false",
    "faults": f"a list such as [{_FAULT_EXAMPLE}]",
    "model": "a preset such as llama2_70b, or a mapping of sizes",
    "experiment": "a preset such as rlhf_phases",
    "cfg": "job, which shows the configuration and ends",
}
_GROUPS = {key.partition(".")[0] for key in _ALLOWED if "." in key}
_OPEN = ("topology", "model")
"""Keys with keys inside that are checked by who reads them."""
_PLACED = ("source", "target", "topology", "model", "experiment")
"""Groups that every configuration has a place for, so that files may override their choice."""


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Megatron's arguments and our overrides; the latter None where the flag is absent.

    ``--dynatrain`` takes all following arguments up to the next that begins with a dash. Raises
    ConfigError where the flag is given twice or with an equals sign.
    """
    host: list[str] = []
    overrides: list[str] | None = None
    taking = False
    for argument in argv:
        if argument.startswith(f"{FLAG}="):
            rest = argument.removeprefix(f"{FLAG}=")
            raise ConfigError(f"{argument!r}: write {FLAG} {rest}, with a space after {FLAG}")
        if argument == FLAG:
            if overrides is not None:
                raise ConfigError(f"{FLAG} is given twice; write all overrides after one {FLAG}")
            overrides, taking = [], True
        elif taking and overrides is not None and not argument.startswith("-"):
            overrides.append(argument)
        else:
            taking = False
            host.append(argument)
    return host, overrides


class Composed(NamedTuple):
    """A configuration, and itself as YAML: what ``cfg=job`` shows."""

    config: DynaTrainConfig
    text: str


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> Composed:
    """The configuration of a job that Hydra overrides such as ``engine.staging_mib=64`` describe.

    ``config_dir`` has presets of the user's own. Where a key is given twice the later one counts.
    Raises ConfigError for every mistake.
    """
    composed = _compose(overrides, config_dir)
    if composed.config.model is not None:
        raise ConfigError(
            "model is for dynatrain plan and dynatrain simulate; the model of a job is that of its "
            "Megatron flags: leave model out"
        )
    return composed


def compose_ahead(overrides: Sequence[str], config_dir: Path | None = None) -> Composed:
    """The same for planning without a job: with a ``model``, and a ``target`` at any time."""
    return _compose(overrides, config_dir, target_at=1)


def asks_to_show(overrides: Sequence[str]) -> bool:
    """Whether ``cfg=job`` is among them."""
    return any(override.partition("=")[0].strip() == "cfg" for override in overrides)


def to_json(config: DynaTrainConfig) -> str:
    """As text that :func:`from_json` reads."""
    return json.dumps(asdict(config))


def from_json(text: str) -> DynaTrainConfig:
    """What :func:`to_json` wrote."""
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(DynaTrainConfig)
    for node in (schema, schema.engine, schema.elastic, schema.control):
        OmegaConf.set_readonly(node, None)
    tree = OmegaConf.to_container(OmegaConf.merge(schema, json.loads(text)))
    assert isinstance(tree, dict)
    return _from_tree({str(key): value for key, value in tree.items()})


def _compose(
    overrides: Sequence[str], config_dir: Path | None, target_at: int | None = None
) -> Composed:
    presets = Presets(config_dir)
    choices = _sorted_out([_parse_override(text) for text in overrides], presets)
    tree = _hydra_compose(choices, presets)
    if tree["target"] is not None and tree["switch_at"] is None and not tree["schedule"]:
        tree["switch_at"] = target_at
    shown = tree if target_at is not None else {k: v for k, v in tree.items() if k != "model"}
    text = _as_yaml(shown)
    return Composed(_from_tree(tree), text)


def _from_tree(tree: dict[str, Any]) -> DynaTrainConfig:
    engine = EngineConfig(**tree.pop("engine"))
    elastic = ElasticConfig(**tree.pop("elastic"))
    control = ControlConfig(**tree.pop("control"))
    schedule, faults = (tuple(tree.pop(name)) for name in ("schedule", "faults"))
    return DynaTrainConfig(
        engine=engine, elastic=elastic, control=control, schedule=schedule, faults=faults, **tree
    )


class _Override(NamedTuple):
    """``key=value`` as it was written and as Hydra reads it."""

    text: str
    key: str
    value: object


class _Choices(NamedTuple):
    """Overrides for Hydra, values that are set after it, and all single settings by key.

    A text for a key that is a group too (``topology=my.yaml``) would be taken for a preset's name
    by Hydra, so such values are set last.
    """

    hydra: list[str]
    plain: dict[str, object]
    given: dict[str, object]


def _parse_override(text: str) -> _Override:
    """One override; only ``key=value`` is taken."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType

    try:
        override = OverridesParser.create().parse_override(text)
        value = override.value()
    except Exception as error:
        # Hydra's parser raises much besides its own exceptions; for the user all mean the same.
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"override {_show(text)} cannot be read: {_show(reason or type(error).__name__)}. "
            f"Write key=value, close every brace, bracket and quote, and put each override into "
            f"shell quotes, for example 'schedule=[{_EXAMPLE}]'"
        ) from error
    if override.type is not OverrideType.CHANGE or override.package is not None:
        raise ConfigError(f"override {_show(text)} is not of the form key=value; keys: {_keys()}")
    key = override.key_or_group
    if override.is_sweep_override():
        raise ConfigError(
            f"{_show(text)} gives {key} several values; {key} must be {_allowed(key)}. "
            f"Put a text with commas into quotes"
        )
    return _Override(text, key, value)


def _sorted_out(overrides: Sequence[_Override], presets: Presets) -> _Choices:
    """Presets told from values; of several for one key that are no mappings the last counts."""
    hydra: dict[int, _Override] = {}
    plain: dict[str, object] = {}
    given: dict[str, object] = {}
    for number, override in enumerate(overrides):
        text, key, value = override
        if key == "cfg":
            if value != "job":
                _refuse(key, value)
            continue
        chosen = (key in _PLACED or key in _GROUPS) and presets.has(key, value)
        if key == "experiment" and not chosen:
            raise ConfigError(f"experiment={_show(value)} is no preset{presets.hint(key, value)}")
        given |= {key: value} if chosen else dict(_leaves(key, value))
        if chosen:
            text = f"{key}={value}" if key in _PLACED else f"+{key}={value}"
        elif key not in _ALLOWED and key.partition(".")[0] in _OPEN:
            text = f"++{text.strip()}"  # who reads it says what may be in it
        if chosen or (key in _PLACED and not isinstance(value, Mapping)):
            hydra = {at: old for at, old in hydra.items() if old.key != key}
        plain.pop(key, None)
        if not chosen and key in _PLACED and not isinstance(value, Mapping):
            plain[key] = value
        else:
            hydra[number] = _Override(text, key, value)
    _check_inner(list(hydra.values()), plain)
    return _Choices([override.text for override in hydra.values()], plain, given)


def _check_inner(overrides: Sequence[_Override], plain: dict[str, object]) -> None:
    """Single values of a mapping go with a preset, a mapping or nothing, not with a text."""
    for override in overrides:
        whole = override.key.partition(".")[0]
        if whole == override.key or whole not in plain:
            continue
        if plain[whole] not in ("auto", None):
            raise ConfigError(
                f"{override.key}={_show(override.value)} sets one value of a mapping, but "
                f"{whole}={_show(plain[whole])} is none; write it there, or choose a preset"
            )
        del plain[whole]


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """(key, value) for each single setting; refuses keys that do not exist."""
    if key in _ALLOWED or key.partition(".")[0] in _OPEN:
        yield key, value
    elif key in _GROUPS:
        if not isinstance(value, Mapping):
            _refuse(key, value)
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        whole = next((setting for setting in _ALLOWED if key.startswith(f"{setting}.")), None)
        if whole:
            raise ConfigError(
                f"key {key!r} is unknown: {whole} is one value, {_allowed(whole)}; "
                f"got {key}={_show(value)}"
            )
        group, _, name = key.rpartition(".")
        known = _inner_keys(group) if group in _GROUPS else list(_ALLOWED)
        hint = did_you_mean(name if group in _GROUPS else key, known)
        raise ConfigError(
            f"key {key!r} is unknown{hint}; got {key}={_show(value)}; keys: {_keys()}"
        )


def _hydra_compose(choices: _Choices, presets: Presets) -> dict[str, Any]:
    """Defaults with presets and values merged in by Hydra, types converted, all resolved."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(DynaTrainConfig)
    # A schema from frozen classes is read-only, overrides included.
    for node in (schema, schema.engine, schema.elastic, schema.control):
        OmegaConf.set_readonly(node, None)
    places = [{group: None} for group in _PLACED]
    ConfigStore.instance().store(name="dynatrain_schema", node=schema)
    ConfigStore.instance().store(
        name="dynatrain_config", node={"defaults": ["dynatrain_schema", *places, "_self_"]}
    )
    overrides = choices.hydra
    if presets.own is not None:
        overrides = [*overrides, f"hydra.searchpath=[pkg://{PACKAGE}]"]
    # The job may use Hydra itself; there is one global instance, so ours takes its place briefly.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    folder = str(presets.folders[0])
    try:
        with initialize_config_dir(folder, version_base=None, job_name="dynatrain"):
            tree = hydra_compose("dynatrain_config", overrides=overrides)
            for key, value in choices.plain.items():
                OmegaConf.update(tree, key, value, merge=False)
            found = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
            assert isinstance(found, dict)
            _name_layouts(found, presets, lambda name: _layout_preset(name, hydra_compose))
    except ConfigError:
        raise
    except Exception as error:
        # What is wrong with a file comes as YAML's, the system's or anybody's exception.
        _explain(error, choices.given)
    finally:
        GlobalHydra.instance().hydra = outer
    return {str(key): value for key, value in found.items()}


def _name_layouts(
    tree: dict[Any, Any], presets: Presets, layout_of: Callable[[str], object]
) -> None:
    """Put presets of the group ``layout`` where their names stand for layouts."""
    for key in ("source", "target"):
        if presets.has("layout", tree[key]):
            tree[key] = layout_of(tree[key])
    for step in tree["schedule"]:
        if isinstance(step, dict) and presets.has("layout", step.get("layout")):
            step["layout"] = layout_of(step["layout"])


def _layout_preset(name: str, hydra_compose: Callable[[str], Any]) -> object:
    from omegaconf import OmegaConf

    tree = hydra_compose(f"layout/{name}")
    return OmegaConf.to_container(tree.get("layout"), resolve=True)


def _as_yaml(tree: Mapping[str, object]) -> str:
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(OmegaConf.create(dict(tree))))


def _explain(error: BaseException, given: Mapping[str, object]) -> NoReturn:
    """Raise the ConfigError that says which setting ``error`` is about."""
    cause: BaseException | None = error
    while cause is not None:
        full_key = str(getattr(cause, "full_key", None) or "").partition("[")[0]
        for key in given:
            if full_key == key or full_key.startswith(f"{key}."):
                _refuse(key, given[key], error)
        cause = cause.__cause__ or cause.__context__
    reason = _show(" ".join(str(error).split()) or type(error).__name__)
    where = str(getattr(error, "full_key", None) or "")
    settings = " ".join(f"{key}={_show(value)}" for key, value in given.items())
    raise ConfigError(
        f"{settings or 'the configuration'} cannot be composed: {where and f'{where}: '}{reason}"
    ) from error


def _schedule_steps(schedule: Sequence[Any]) -> Iterator[ScheduleStep]:
    last = 0
    for index, entry in enumerate(schedule):
        key = f"schedule[{index}]"
        _check_entry(key, entry, ("iteration", "layout"), (), _EXAMPLE)
        iteration = entry["iteration"]
        _check_count(f"{key}.iteration", iteration)
        if iteration <= last:
            raise ConfigError(
                f"{key}.iteration={iteration} must be above schedule[{index - 1}].iteration={last}"
            )
        last = iteration
        _check_layout(f"{key}.layout", entry["layout"])
        yield ScheduleStep(iteration, entry["layout"])


def _fault(key: str, entry: Any) -> Fault:
    """One fault as a user writes it; ``rank`` may be a list."""
    _check_entry(key, entry, ("rank", "phase", "kind"), ("at", "seconds"), _FAULT_EXAMPLE)
    given = entry["rank"]
    ranks = list(given) if isinstance(given, list | tuple) else [given]
    if not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
        _refuse_as(f"{key}.rank", given, "a rank, or a list of ranks such as [0, 2]")
    phase, kind = (
        _choice(f"{key}.{name}", entry[name], choices)
        for name, choices in (("phase", Phase), ("kind", Kind))
    )
    if kind is Kind.bitflip and phase is not Phase.wire:
        _refuse_as(f"{key}.phase", phase, "wire where kind is bitflip: messages are there")
    at, seconds = entry.get("at", 1), entry.get("seconds", 1.0)
    _check_count(f"{key}.at", at)
    if type(seconds) not in (int, float) or not (math.isfinite(seconds) and seconds >= 0):
        _refuse_as(f"{key}.seconds", seconds, "a number of at least 0")
    return Fault(tuple(ranks), Phase(phase), Kind(kind), at, float(seconds))


def _choice(key: str, value: object, choices: type[StrEnum]) -> StrEnum:
    if not isinstance(value, str) or value not in list(choices):
        _refuse_as(key, value, _one_of(choices))
    return choices(value)


def _check_entry(
    key: str, entry: object, needed: tuple[str, ...], other: tuple[str, ...], example: str
) -> None:
    """An entry of a list is a mapping with all ``needed`` keys and none but those and ``other``."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key}={_show(entry)} is not allowed; it must be like {example}")
    allowed = (*needed, *other)
    for name in entry:
        if name not in allowed:
            raise ConfigError(
                f"key '{key}.{_show(name)}' is unknown{did_you_mean(str(name), allowed)}; got "
                f"{_show(entry[name])}; keys: {', '.join(allowed)}"
            )
    for name in needed:
        if name not in entry:
            raise ConfigError(f"{key}={_show(entry)} lacks {name}; it must be like {example}")


def _check_layout(key: str, value: object) -> None:
    try:
        read_changes(value)
    except LayoutError as error:
        raise ConfigError(f"{key}={_show(value)} is not a layout: {error}") from error


def _check_count(key: str, value: object) -> None:
    if type(value) is not int or value < 1:
        _refuse(key, value)


def _refuse(key: str, value: object, cause: BaseException | None = None) -> NoReturn:
    _refuse_as(key, value, _allowed(key), cause)


def _refuse_as(
    key: str, value: object, allowed: str, cause: BaseException | None = None
) -> NoReturn:
    raise ConfigError(f"{key}={_show(value)} is not allowed; {key} must be {allowed}") from cause


def _allowed(key: str) -> str:
    if key in _GROUPS:
        return f"a group {{{', '.join(f'{name}: …' for name in _inner_keys(key))}}}"
    return _ALLOWED.get(key, _COUNT)


def _inner_keys(group: str) -> list[str]:
    return [key.partition(".")[2] for key in _ALLOWED if key.startswith(f"{group}.")]


def _keys() -> str:
    return ", ".join(_ALLOWED)


def _show(value: object) -> str:
    """A value as a user would write it, cut off where that is long."""
    text = _written(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        inside = (f"{_written(key)}: {_written(inner)}" for key, inner in value.items())
        return "{" + ", ".join(inside) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_written(inner) for inner in value) + "]"
    text = str(value)
    # Quotes where the text is not one word, or would be read as something else without them.
    plain = text and text.isprintable() and text == text.strip()
    number = isinstance(value, str) and text.removeprefix("-").isdigit()
    text = text if plain and not number else repr(text)
    return text
