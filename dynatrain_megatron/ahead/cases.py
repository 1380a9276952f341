"""Switches to look at ahead: model, layouts and topology, from a configuration or a job's flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dynatrain_megatron.ahead.flags import JobFlags, read_flags
from dynatrain_megatron.config import DynaTrainConfig, EnginePlacement
from dynatrain_megatron.errors import ConfigError, LayoutError
from dynatrain_megatron.layout import ModelShape, ParallelLayout, derive, read_changes
from dynatrain_megatron.planner import PlanOptions, Topology, TopologyFile, read_topology_file
from dynatrain_megatron.shapes import Model, model_shape, read_model

MOST_RANKS = 1 << 17


@dataclass(frozen=True, slots=True)
class Case:
    """One switch. ``topology`` is over the larger of both worlds.

    ``place`` asks how much less would move if processes took other ranks of the target.
    """

    model: Model
    source: ParallelLayout
    target: ParallelLayout
    topology: Topology
    options: PlanOptions
    weights_only: bool = False
    place: bool = False

    @property
    def num_ranks(self) -> int:
        return max(self.source.world, self.target.world)


@dataclass(frozen=True, slots=True)
class Impossible:
    """A target that cannot be, and why."""

    source: ParallelLayout
    target: str
    reason: str


def read_cases(
    config: DynaTrainConfig,
    flags: Sequence[str] = (),
    *,
    world: int | None = None,
    weights_only: bool = False,
) -> list[Case | Impossible]:
    """Each switch of a configuration in turn; one that cannot be leaves the layout as it is.

    The model is ``config.model``, or that of Megatron's ``flags`` of a job of ``world`` ranks, and
    so is the source where it is ``auto``. Raises ConfigError for what is missing or wrong.
    """
    job = _job(flags, world) if flags else None
    if job is None and world is not None and config.source != "auto":
        raise ConfigError("--world goes with Megatron flags after --; name dp or world in source")
    model = _model(config, job)
    source = _source(config, job, world)
    topology_file = None if config.topology == "auto" else read_topology_file(config.topology)
    options = PlanOptions.of(config.engine)
    _check(source, model, job, "source")
    found: list[Case | Impossible] = []
    for step in config.steps():
        text = _text(step.layout_changes)
        try:
            target = read_layout(step.layout_changes, source)
            _check_world(target)
            target.check(_shape(model, target, job))
            _check_known(target)
        except LayoutError as error:
            found.append(Impossible(source, text, str(error)))
            continue
        ranks = max(source.world, target.world)
        topology = topology_of(topology_file, ranks)
        place = config.engine.placement is EnginePlacement.best
        found.append(Case(model, source, target, topology, options, weights_only, place))
        source = target
    if not found:
        raise ConfigError("target is missing: add target=… (or schedule=…, or experiment=…)")
    return found


def read_layout(wanted: object, base: ParallelLayout | None = None) -> ParallelLayout:
    """A layout as a user writes it, of a world of its own.

    Its ranks are those that it names, by ``world`` or by all degrees with ``dp``; else as many as
    ``base`` has, or as its other degrees need. Raises LayoutError.
    """
    asked = read_changes(wanted)
    start = ParallelLayout() if base is None else base
    degrees = [asked.get(axis, getattr(start, axis)) for axis in ("tp", "pp", "cp")]
    world = asked.get("world")
    if world is None and (asked.get("dp") is not None or base is None):
        world = asked.get("dp", 1)
        for degree in degrees:
            world *= degree  # type: ignore[operator]  # read_changes has looked at them
    if world is None:
        world = start.world
    assert isinstance(world, int)
    return derive(start, asked, world)


def topology_of(file: TopologyFile | None, num_ranks: int) -> Topology:
    """Nodes of eight ranks where nothing else is said; a world smaller than a node is in one.

    Raises ConfigError where the file deals out ranks in a way that these do not fit.
    """
    per_node = 8 if file is None or file.ranks_per_node is None else file.ranks_per_node
    dealt = Topology.of_nodes(num_ranks, per_node)
    if file is None:
        return dealt
    if not file.nodes:
        speeds = dataclasses.replace(dealt.speeds, **dict(file.speeds))
        return Topology(dealt.node, file.node_width, speeds)
    if any(node.hosts for node in file.nodes):
        raise ConfigError(
            f"topology={file.path}: nodes by hosts need a job, whose hosts they are; give ranks or "
            "ranks_per_node"
        )
    return file.over(dealt, [""] * num_ranks)


def _job(flags: Sequence[str], world: int | None) -> JobFlags:
    if world is None:
        raise ConfigError("Megatron flags do not say how many ranks there are: add --world N")
    try:
        return read_flags(flags, world)
    except LayoutError as error:
        raise ConfigError(f"Megatron flags: {error}") from error


def _model(config: DynaTrainConfig, job: JobFlags | None) -> Model:
    if job is not None:
        if config.model is not None:
            raise ConfigError("model and Megatron flags exclude each other; leave one of them out")
        return job.model
    if config.model is None:
        raise ConfigError(
            "model is missing: add model=llama2_70b or another preset, or a job's Megatron flags "
            "after --"
        )
    return read_model(config.model)


def _source(config: DynaTrainConfig, job: JobFlags | None, world: int | None) -> ParallelLayout:
    base = None if job is None else job.layout
    if config.source == "auto":
        if base is None:
            raise ConfigError("source is missing: add source=tp8-pp4-dp4 or another layout")
        return base
    try:
        source = read_layout(config.source, base)
        if world is not None and source.world != world:
            raise LayoutError(f"it has {source.world} ranks, but --world is {world}")
        _check_world(source)
    except LayoutError as error:
        raise ConfigError(f"source={_text(config.source)} cannot be: {error}") from error
    return source


def _check(layout: ParallelLayout, model: Model, job: JobFlags | None, key: str) -> None:
    try:
        _check_world(layout)
        layout.check(_shape(model, layout, job))
        _check_known(layout)
    except LayoutError as error:
        raise ConfigError(f"{key}={layout} cannot be: {error}") from error


def _check_world(layout: ParallelLayout) -> None:
    if layout.world > MOST_RANKS:
        raise LayoutError(f"world={layout.world} is above {MOST_RANKS}, the most that is planned")


def _check_known(layout: ParallelLayout) -> None:
    if layout.pipeline is not None:
        raise LayoutError(
            f"pipeline={layout.pipeline}: which layers a pipeline string puts where is known to a "
            "job only; leave it out for an estimate"
        )


def _shape(model: Model, layout: ParallelLayout, job: JobFlags | None) -> ModelShape:
    chunks = layout.pp * (layout.vpp or 1)
    if chunks > model.num_layers:
        raise LayoutError(
            f"pp*vpp={chunks} stages are more than the model's num_layers={model.num_layers}"
        )
    shape = model_shape(model, chunks)
    if job is None:
        return shape
    return dataclasses.replace(
        shape, global_batch_size=job.global_batch_size, seq_length=job.seq_length
    )


def _text(layout: object) -> str:
    if isinstance(layout, dict):
        return "{" + ", ".join(f"{key}: {value}" for key, value in layout.items()) + "}"
    return str(layout)
