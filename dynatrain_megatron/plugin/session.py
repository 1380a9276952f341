"""One training run with the plugin attached: what the hooks saw, and when to switch.

The session turns the host's calls into a :class:`Job` and the schedule into switches. A switch
leaves ``train`` by an exception raised at the step boundary, runs outside the ``except`` block (a
traceback would keep the old layout's frames alive) and enters ``train`` again, which goes on from
``args.iteration``.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import secrets
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynatrain_megatron import faults
from dynatrain_megatron.adapters import groups, timers, writers
from dynatrain_megatron.adapters.arguments import LaunchArguments, layout_of
from dynatrain_megatron.adapters.batches import consumed_after
from dynatrain_megatron.adapters.built import Built, BuiltCache, BuiltKey
from dynatrain_megatron.adapters.handover import stay, sync_functions
from dynatrain_megatron.adapters.job import Iterators, Job, Recipe
from dynatrain_megatron.adapters.samplers import LaunchData
from dynatrain_megatron.adapters.skeleton import Skeleton, build_nothing, edits_of
from dynatrain_megatron.config import (
    DynaTrainConfig,
    EnginePlacement,
    OnLeave,
    OnRefusal,
    Overlap,
    ScheduleStep,
)
from dynatrain_megatron.elastic import connections, live
from dynatrain_megatron.elastic.control import JobFile
from dynatrain_megatron.elastic.endpoint import Endpoint
from dynatrain_megatron.elastic.reach import be_reached
from dynatrain_megatron.elastic.store import JobStore, StoreAddress, StoreOwner, node_of_launch
from dynatrain_megatron.elastic.world import process_uid
from dynatrain_megatron.errors import (
    CommitError,
    DynaTrainError,
    LayoutError,
    SplitStateError,
    SwitchAborted,
    SwitchRefused,
    TransitionError,
    WorldError,
)
from dynatrain_megatron.layout import ParallelLayout, derive
from dynatrain_megatron.observe import RunLog, progress, scalars
from dynatrain_megatron.observe.metrics import Exporter, Figures
from dynatrain_megatron.observe.phases import PHASES
from dynatrain_megatron.planner import PlanOptions, read_topology_file
from dynatrain_megatron.platform import current as current_platform
from dynatrain_megatron.plugin.joining import Joining, card_of
from dynatrain_megatron.plugin.leader import Leader, wanted_world
from dynatrain_megatron.plugin.membership import Membership, Pending, layout_text
from dynatrain_megatron.plugin.placing import Placing
from dynatrain_megatron.plugin.signals import Signals
from dynatrain_megatron.policies import load_policy
from dynatrain_megatron.transition import Target, check_request, switch
from dynatrain_megatron.transition.posted import Posted
from dynatrain_megatron.transition.switch import SwitchOptions, SwitchReport, wire_of

Original = Callable[..., Any]
Call = inspect.BoundArguments


_LEAD_STEPS = 10
"""So many steps before a step of the schedule its worlds begin to be built."""


class SwitchNow(BaseException):
    """Leaves ``train`` at a step boundary. Not an Exception: no handler of the host may eat it."""


@dataclass(frozen=True)
class _Due:
    """A switch that begins now, and the seconds its checks took at this boundary."""

    pending: Pending
    prepare_s: float


class Session:
    """State of one run; its ``on_…`` methods are what the hooks call, on every rank alike."""

    def __init__(self, config: DynaTrainConfig) -> None:
        """Raises ConfigError where the topology file or the policy is wrong.

        Raises WorldError where no job answers to a process that is to join one.
        """
        self._joining: Joining | None = None
        if config.elastic.join is not None:
            self._joining = Joining(config, timeout_s=config.elastic.connect_timeout_s)
            self._joining.enter_fake_world()
            config = self._joining.config
        self._meet_within_reach(config)
        self.config = config
        faults.arm(config.planned_faults())
        self._topology = None if config.topology == "auto" else read_topology_file(config.topology)
        self._policy = None if config.policy is None else load_policy(config.policy)
        self._metrics: dict[str, float] = {}
        self._figures = Figures(Path(config.run_dir).resolve().name)
        self._exporter: Exporter | None = None
        self.log = RunLog(config.run_dir)
        self.job: Job | None = None
        self.cannot_switch = ""  # why no switch can be in this run, whatever is asked for
        self._steps: list[tuple[int, ScheduleStep]] = list(enumerate(config.steps()))
        self._membership: Membership | None = None
        self._store_is_gone = False
        self._leader: Leader | None = None
        self._store_owner = StoreOwner()
        self._launch: LaunchArguments | None = None
        self._launch_layout: ParallelLayout | None = None
        self._baseline: Namespace | None = None
        self._pretrain: dict[str, Any] = {}
        self._setup: tuple[Original, Call] | None = None
        self._build_iterators: Original | None = None
        self._test_iterators: list[Any] = []
        self._num_entries = 0
        self._num_switches = 0
        self._due: _Due | None = None
        self._saved_iteration: int | None = None
        self._save_pending = False
        self._broken: TransitionError | None = None

    @staticmethod
    def _meet_within_reach(config: DynaTrainConfig) -> None:
        """Let others reach this process, before any group is made."""
        elastic = config.elastic
        given = elastic.join or (None if elastic.store == "auto" else elastic.store)
        with contextlib.suppress(WorldError):  # a launch that does not say where
            be_reached(StoreAddress.of_launch() if given is None else StoreAddress.parse(given))

    # -- before training ---------------------------------------------------------------------

    def on_validate_args(self, original: Original, call: Call) -> Any:
        """Keep the launch flags, then look at the whole schedule before anything is started."""
        parsed = call.arguments["args"]
        if self._launch is not None:
            return original(*call.args, **call.kwargs)
        for key in ("save_before_switch", "save_after_switch"):
            if getattr(self.config, key) and not (parsed.save and parsed.save_interval):
                _end(
                    f"{key}=true needs a directory for the checkpoints; add --save DIR and "
                    f"--save-interval N (Megatron asks for both) or leave {key} out",
                    parsed.rank,
                )
        launch = LaunchArguments.capture(parsed, call.arguments.get("defaults") or {})
        result = original(*call.args, **call.kwargs)
        args = parsed if result is None else result
        if self._joining is not None:
            refusals = self._joining.refusals(launch)
            if refusals:
                told = "; ".join(refusals)
                _end(f"this process cannot join: {told}; start it with the job's flags", 0)
            self._joining.keep_quiet(args)
        self._launch, self._baseline = launch, Namespace(**vars(args))
        self._launch_layout = layout_of(args, launch)
        if self._joining is None:
            self._check_schedule(args)
        return result

    def _check_schedule(self, args: Namespace) -> None:
        """Say before the start what will be refused; with ``on_refusal: fail`` do not start."""
        assert self._launch is not None and self._launch_layout is not None
        source = self._launch_layout
        if self.config.source != "auto":
            try:
                declared = derive(source, self.config.source, args.world_size)
            except LayoutError as error:
                _end(f"source={self.config.source}: {error}", args.rank)
            if declared != source:
                _end(
                    f"source={declared} is not the layout of the flags, which is {source}; leave "
                    "source out or mend the flags",
                    args.rank,
                )
        world = args.world_size
        for _, step in self._steps:
            try:
                world = wanted_world(step.layout_changes) or world
                source = check_request(
                    step.layout_changes,
                    launch=self._launch,
                    launch_layout=self._launch_layout,
                    source=source,
                    args=args,
                    consumed_samples=consumed_after(args, step.iteration),
                    world=world,
                    rank=0,
                ).layout
            except SwitchRefused as refusal:
                message = f"the switch at iteration {step.iteration} is not possible: {refusal}"
                if self.config.on_refusal is OnRefusal.fail:
                    _end(message, args.rank)
                progress(args.rank, f"warning: {message}")

    def on_pretrain(self, original: Original, call: Call) -> Any:
        """Keep what ``pretrain`` was given; once, though scripts may see it under two names."""
        if not self._pretrain:
            call.apply_defaults()
            self._pretrain = dict(call.arguments)
            self._see_edits()
        return original(*call.args, **call.kwargs)

    def _see_edits(self) -> None:
        """A container that a script has changed cannot be made anew: then no switch can be."""
        from megatron.training import get_args

        if self._launch is None or self.cannot_switch:
            return
        given = "the config container that pretrain was given"
        try:
            if edits := edits_of(self._pretrain.get("cfg_container"), get_args()):
                self.cannot_switch = f"{given} is not that of the flags: {edits}; let a flag say it"
        except Exception as error:  # a script's own kind, which none of Megatron's functions makes
            self.cannot_switch = f"{given} cannot be made from the flags: {error}"

    def on_setup(self, original: Original, call: Call) -> Any:
        if self._setup is None:
            self._setup = (original, call)
        if self._joining is not None:
            return build_nothing(lambda: original(*call.args, **call.kwargs))
        return original(*call.args, **call.kwargs)

    def on_build_iterators(self, original: Original, call: Call) -> Any:
        self._build_iterators = original
        if self._joining is not None:
            self._joining.expect_to_train()
            self._test_iterators.append(None)
            return None, None, None
        built = original(*call.args, **call.kwargs)
        self._test_iterators.append(built[2])
        return built

    # -- training ----------------------------------------------------------------------------

    def on_train(self, original: Original, call: Call) -> Any:
        """Run ``train``, and again after each switch, until it returns."""
        self._check_whole()
        try:
            job = self._first_job(call)
        except SwitchRefused as refusal:
            if self._joining is not None or self.config.on_refusal is OnRefusal.fail:
                raise
            told = f"no switch can be made in this run, which trains on: {refusal}"
            progress(int(os.environ.get("RANK", "0")), told)
            return original(*call.args, **call.kwargs)
        self.job = job
        current_platform().links()  # takes a while the first time: not when a switch waits for it
        self._take_part(job)
        if self._joining is None:
            layout = {scalars.LAYOUT: str(job.layout)}
            writers.write(job.iteration + 1, scalars.of_layout(job.layout), layout)
        try:
            if self._joining is not None:
                self._enter(job)
                self._use(job, call)
            return self._train(job, original, call)
        finally:
            self._part(job)

    def _train(self, job: Job, original: Original, call: Call) -> Any:
        while True:
            self._num_entries += 1
            functions = sync_functions(job.config)
            try:
                return original(*call.args, **call.kwargs)
            except SwitchNow:
                pass
            if not self._switch(job):
                stay(job, functions)
            elif job.built is None:
                self._leave(job)
            self._use(job, call)

    def _use(self, job: Job, call: Call) -> None:
        call.arguments["train_data_iterator"] = job.iterators.train
        call.arguments["valid_data_iterator"] = job.iterators.valid

    def _take_part(self, job: Job) -> None:
        """Begin to watch the job's store, where there is one; on rank 0 tell of the job in it."""
        if job.store is None:
            return
        assert self._launch is not None and self._launch_layout is not None
        elastic, options = self.config.elastic, self._options()
        overlap = elastic.overlap.on(current_platform().backend)
        self._membership = Membership(
            job,
            job.store,
            self._check_posted,
            wire_of(options),
            run_dir=self.log.run_dir,
            overlap=overlap,
            timeout_s=elastic.timeout_s,
        )
        self._leader = Leader(
            job,
            self._membership,
            self._feasible,
            lead_steps=0 if overlap is Overlap.off else _LEAD_STEPS,
            policy=self._policy,
            launch_layout=self._launch_layout,
            placing=self._placing(job),
        )
        if self._joining is None and self._membership.leads:
            card = card_of(job.store.job, self._launch, self.config)
            card.write(job.store.address, timeout_s=elastic.connect_timeout_s)
            JobFile(str(job.store.address), job.store.job, job.secret).write(self.log.run_dir)
            self._membership.directory.own(self._store_owner)
            told = f"processes can join at {job.store.address}"
            if self._store_owner.processes:
                told += f", {self._store_owner.what}: it ends with that"
            progress(0, told)
        self._membership.start()
        control = self.config.control
        self._signals = Signals(elastic.leave_signal, control.signal, self._membership, job.args)
        membership = self._membership
        self._endpoint = Endpoint(self.log.run_dir, lambda: membership.leads, membership.reply)
        if control.metrics_file is not None or control.metrics_port is not None:
            name = control.metrics_file
            file = None if name is None else self.log.run_dir / name
            self._exporter = Exporter(
                self._render, file, control.metrics_host, control.metrics_port
            )

    def _placing(self, job: Job) -> Placing | None:
        if self.config.engine.placement is EnginePlacement.identity:
            return None
        assert self._baseline is not None
        return Placing(job, self._baseline, self._topology)

    def _part(self, job: Job) -> None:
        """However training has ended here; on rank 0 those that wait for the job learn of it."""
        if self._membership is None:
            return
        self._membership.stop()
        self._endpoint.stop()
        self._signals.restore()
        if self._exporter is not None:
            self._exporter.stop()
        if self._membership.leads:
            with contextlib.suppress(WorldError, RuntimeError):
                self._membership.directory.end("training has ended")

    def _render(self) -> str | None:
        """What Prometheus is told; None where another process tells it. On any thread."""
        membership, job = self._membership, self.job
        if membership is None or job is None or not membership.leads:
            return None
        status = membership.status()
        return self._figures.text(
            iteration=status["iteration"],
            layout=job.layout,
            waiting=len(status["waiting"]),
            leaving=len(status["leaving"]),
            switching=status["switch"] is not None,
        )

    # -- joining and leaving -----------------------------------------------------------------

    def _enter(self, job: Job) -> None:
        """Wait until the job takes this process in; ends the process where the job ends first."""
        membership = self._membership
        assert membership is not None
        number = membership.directory.arrive(membership.uid)
        while True:
            print(f"[dynatrain] {membership.uid} waits to be taken into the job", flush=True)
            try:
                pending = membership.wait_for_call()
            except WorldError as error:
                print(f"[dynatrain] {membership.uid} was not taken in: {error}", flush=True)
                raise SystemExit(0) from None
            if pending.prepared is None:  # refused here: the others find out when they connect
                membership.give_up(pending)
                membership.directory.withdraw_arrival(number)
                number = membership.directory.arrive(membership.uid)
                continue
            self._due = _Due(pending, 0.0)
            membership.directory.withdraw_arrival(number)
            if self._switch(job):
                break
            number = membership.directory.arrive(membership.uid)
        self._num_entries = max(1, self._num_entries)  # the run's first step was another's
        # As those do who were there before: all have to find the same step due at the same time.
        self._steps = list(enumerate(self.config.steps()))[job.next_step :]

    def _leave(self, job: Job) -> None:
        """This process has no part in the job any more: it ends, or waits to be taken in again."""
        membership = self._membership
        assert membership is not None
        if self.config.elastic.on_leave is OnLeave.exit:
            print(f"[dynatrain] {membership.uid} has left the job", flush=True)
            raise SystemExit(0)
        membership.withdraw_notice()
        self._enter(job)

    def _first_job(self, call: Call) -> Job:
        from megatron.training import get_args

        if self._setup is None or self._build_iterators is None or self._launch is None:
            raise SwitchRefused(
                "train() was called without Megatron's own prologue (command-line flags and not "
                "--yaml-cfg, model set-up, data iterators), so there is nothing to build another "
                "layout from",
                "start the run through megatron.training.pretrain",
            )
        assert self._launch_layout is not None and self._baseline is not None
        given = call.arguments
        args = get_args()
        setup, setup_call = self._setup
        tests = self._test_iterators
        virtual = args.virtual_pipeline_model_parallel_size is not None
        self._test_iterators = []  # the job has them; what it drops must be free to go
        job = Job(
            launch=self._launch,
            recipe=Recipe(
                setup,
                setup_call.args,
                dict(setup_call.kwargs),
                self._build_iterators,
                self._pretrain["train_valid_test_dataset_provider"],
                self._pretrain["get_embedding_ranks"],
                self._pretrain["get_position_embedding_ranks"],
                LaunchData.of(args),
            ),
            args=args,
            baseline=self._baseline,
            layout=self._launch_layout,
            model=given["model"],
            optimizer=given["optimizer"],
            scheduler=given["opt_param_scheduler"],
            config=given["config"],
            container=self._pretrain.get("cfg_container"),
            iterators=Iterators(
                given["train_data_iterator"],
                given["valid_data_iterator"],
                list(tests) if virtual else tests[-1],
            ),
            iteration=args.iteration,
            num_flops=args.num_floating_point_operations_so_far,
            dormant=BuiltCache(self.config.elastic.cache_worlds),
            checkpointing_context=given["checkpointing_context"],
        )
        if self._joining is not None:
            job.store = JobStore(
                self._joining.address,
                self._joining.card.name,
                timeout_s=self.config.elastic.timeout_s,
            )
            return job
        elastic = self.config.elastic
        world = live.adopt(live.gather_uids(), groups.capture())
        processes = world.world.processes
        job.store = self._job_store(processes)
        if job.store is not None:
            made = connections.open_now(but_at=job.store.address.port)
            rows = live.gather(json.dumps([here for here, _ in made.values()]))
            ends = [end for row in rows for end in json.loads(row)]
            world.connections = connections.Connections.among(made, ends)
        job.secret = live.gather(secrets.token_hex(16))[0]
        nodes = live.gather(node_of_launch())
        if elastic.store == "auto":
            parks = elastic.on_leave is OnLeave.park
            self._store_owner = StoreOwner.of_launch(processes, nodes, parks=parks)
        key = BuiltKey.of(job.layout, args, processes, world.world.backend)
        job.built = Built(key, world, Skeleton.of_launch(job), args)
        job.built.note_as_built()
        return job

    def _job_store(self, processes: Sequence[str]) -> JobStore | None:
        """Where the processes agree on switches; None where the launch does not say."""
        if self.config.elastic.store != "auto":
            address = StoreAddress.parse(self.config.elastic.store)
        else:
            try:
                address = StoreAddress.of_launch()
            except WorldError:
                return None
        name = hashlib.sha256(",".join(processes).encode()).hexdigest()[:12]
        return JobStore(address, name, timeout_s=self.config.elastic.timeout_s)

    def on_step_end(self, original: Original, call: Call) -> Any:
        """The step boundary: leave ``train`` where a switch is due and the run does not end."""
        should_exit = original(*call.args, **call.kwargs)
        job = self.job
        if should_exit or job is None:
            return should_exit
        job.iteration = call.arguments["iteration"]
        job.num_flops = call.arguments["num_floating_point_operations_so_far"]
        if self._save_pending and job.iteration < job.args.train_iters:
            self._save(job)  # after the last step the host saves by itself
        if job.iteration < job.args.train_iters and self._switch_is_due(job):
            raise SwitchNow
        return should_exit

    def _switch_is_due(self, job: Job) -> bool:
        """Whether a switch begins here; an impossible one is refused without leaving the loop.

        Where the job's store is gone none can be made any more, and training goes on.
        """
        job.stopped_s = time.perf_counter()
        # A run that goes on from a checkpoint may have passed several: only the last one counts.
        while len(self._steps) > 1 and job.iteration >= self._steps[1][1].iteration:
            self._steps.pop(0)
        try:
            return self._finds_switch(job, None if self._store_is_gone else self._membership)
        except WorldError as error:
            self._store_is_gone = True
            progress(job.args.rank, f"no switch can be made any more: {error}")
            return False

    def _finds_switch(self, job: Job, membership: Membership | None) -> bool:
        is_due = False
        pending = None if membership is None else membership.at_boundary(job.iteration)
        if pending is None and self._steps and job.iteration >= self._steps[0][1].iteration:
            pending, is_due = self._step_due(job, membership), True
        if pending is not None:
            self._due = _Due(pending, time.perf_counter() - job.stopped_s)
            return True
        if membership is not None and membership.leads and not is_due:
            assert self._leader is not None
            self._leader.announce(job.iteration, self._steps)
            self._leader.ask_policy(job.iteration, self.config.steps(), self._metrics)
        return False

    def _step_due(self, job: Job, membership: Membership | None) -> Pending | None:
        """The schedule's step that is due, unless it cannot be, or another switch comes first."""
        index, step = self._steps[0]
        own: ParallelLayout | SwitchRefused | LayoutError
        try:
            world = wanted_world(step.layout_changes) or job.args.world_size
            own = self._feasible(step.layout_changes, world)
        except (SwitchRefused, LayoutError) as refusal:
            own = refusal
        try:
            if membership is None:
                if isinstance(own, Exception):
                    raise own
                raise self._no_store()
            pending = self._announced(job, membership, index, step)
        except (SwitchRefused, LayoutError) as refusal:
            self._steps.pop(0)
            if own == job.layout:
                progress(job.args.rank, f"iteration {job.iteration}: already in layout {own}")
            else:  # this process's own words where it has any
                told = own if isinstance(own, Exception) else refusal
                self._refused(job, step.layout_changes, told)
            return None
        if pending is not None and pending.posted.step == index:
            self._steps.pop(0)
        return pending

    def _no_store(self) -> SwitchRefused:
        if self._store_is_gone:
            return SwitchRefused(
                "the job's store is gone, at which its processes would agree on it",
                "the job trains on in its layout; one that is started anew can switch",
            )
        return SwitchRefused(
            "this job's processes have no store to agree on a switch at",
            "start it by torchrun, or give elastic.store=HOST:PORT",
        )

    def _announced(
        self, job: Job, membership: Membership, index: int, step: ScheduleStep
    ) -> Pending | None:
        """Step ``index`` as rank 0 has announced it, or what comes first, or None for later."""
        while True:
            number = job.num_changes + 1
            if membership.leads:
                assert self._leader is not None
                if self._leader.posted < number:
                    self._leader.post_step(step, index)
                elif self._leader.posted_step != index:
                    self._leader.make_way(number)
            pending = membership.announced(number)
            if pending.posted.step != index:
                found = membership.decided(pending, job.iteration)
                if found is not None or not pending.called_off:
                    return found
                continue
            if pending.called_off:  # others were here before
                membership.give_up(pending)
                raise SwitchRefused(pending.called_off)
            membership.prepare(pending)
            if pending.refused:
                membership.refuse(pending)
                raise SwitchRefused(pending.refused)
            if membership.leads:
                membership.board.stop(number, job.iteration)
            # All ask, so that a store that is gone keeps all of them from it.
            if membership.decided(pending, job.iteration) is None:
                raise SwitchRefused(pending.called_off)
            return pending

    def _feasible(self, wanted: Any, world: int, at: int = 0) -> ParallelLayout:
        """The layout of a request, not before iteration ``at``; raises SwitchRefused."""
        job = self.job
        assert job is not None
        rank = job.args.rank if job.args.rank < world else 0
        return self._target(wanted, world, rank, at).layout

    def _check_posted(self, posted: Posted) -> Target:
        """What an announced switch makes of this process; raises SwitchRefused."""
        change, uid = posted.change, process_uid()
        rank = change.target.index(uid) if uid in change.target else 0
        return self._target(posted.layout, len(change.target), rank, posted.at)

    def _target(self, wanted: Any, world: int, rank: int, at: int) -> Target:
        job = self.job
        assert job is not None and self._launch is not None and self._launch_layout is not None
        if self.cannot_switch:
            raise SwitchRefused(self.cannot_switch)
        consumed: int | None = None
        if job.built is not None:
            consumed = job.args.consumed_train_samples
            if at > job.iteration:
                now, then = (consumed_after(job.args, n) for n in (job.iteration, at))
                consumed += then - now
        return check_request(
            wanted,
            launch=self._launch,
            launch_layout=self._launch_layout,
            source=job.layout,
            args=job.args,
            consumed_samples=consumed,
            world=world,
            rank=rank,
        )

    def on_training_log(self, original: Original, call: Call) -> Any:
        """Make the log read as if ``train`` had never been left, and record the step."""
        if self._num_entries > 1:
            if "is_first_iteration" in inspect.signature(original).parameters:
                call.arguments["is_first_iteration"] = False
            if self.job is not None:
                call.arguments["total_loss_dict"] = self.job.totals
        elif self.job is not None:
            self.job.totals = call.arguments["total_loss_dict"]
        self._record_step(call.arguments)
        return original(*call.args, **call.kwargs)

    def on_evaluate(self, original: Original, call: Call) -> Any:
        """Evaluate with the iterators and config in force, whatever the caller still holds."""
        if self.job is not None and self._num_switches:
            kind = "test" if "test set" in call.arguments["prefix"] else "valid"
            call.arguments["data_iterator"] = getattr(self.job.iterators, kind)
        return original(*call.args, **call.kwargs)

    def on_save(self, original: Original, call: Call) -> Any:
        """Save the position of the training iterator in force."""
        self._check_whole()
        if self.job is not None and self._num_switches:
            call.arguments["train_data_iterator"] = self.job.iterators.train
        result = original(*call.args, **call.kwargs)
        if not call.arguments.get("non_persistent_ckpt"):
            self._saved_iteration, self._save_pending = call.arguments["iteration"], False
        return result

    # -- switching ---------------------------------------------------------------------------

    def _switch(self, job: Job) -> bool:
        """Do what is due at this boundary; False where the process stays where it was."""
        assert self._due is not None and self._membership is not None
        due, self._due = self._due, None
        pending = due.pending
        job.next_step = self._steps[0][0] if self._steps else len(self.config.steps())
        job.args.iteration = job.iteration
        job.args.num_floating_point_operations_so_far = job.num_flops
        timers.stop_all()
        assert pending.prepared is not None
        target = pending.prepared.target
        is_saved = self._saved_iteration == job.iteration
        if self.config.save_before_switch and job.built is not None and not is_saved:
            self._save(job)
        if self._membership.leads and pending.posted.change.joiners:
            # Only now: however long the checkpoint takes, they wait for it outside the switch.
            with contextlib.suppress(WorldError):  # which the switch itself finds out
                self._membership.board.say_stopped(pending.number)
        try:
            with self._membership.switching(pending):
                report = switch(job, target, self._options(), pending.prepared, pending.building)
            self._membership.taken(pending.prepared.change.joiners)
        except (SwitchRefused, SwitchAborted) as refusal:
            pending.refused = str(refusal)
            self._membership.give_up(pending)
            self._refused(job, pending.posted.layout, refusal)
            return False
        except TransitionError as error:
            told = type(error)(f"{error}{self._last_checkpoint(job)}")
            if isinstance(error, SplitStateError | CommitError):
                self._broken = told
            self._membership.end(pending, error)
            raise told from error
        self._membership.conclude(pending)
        self._num_switches += 1
        self._membership.forget_before(pending.posted.change)
        job.args.iteration = job.iteration
        report.origin = pending.posted.origin
        report.placement = pending.posted.placement
        report.seconds = {"prepare": due.prepare_s, **report.seconds}
        if job.built is None:
            return True
        if self.config.save_after_switch:
            begin = time.perf_counter()
            saved = -1 if self._saved_iteration is None else self._saved_iteration
            saved = int(timers.longest(saved))  # one that has joined does not know, and all save
            self._saved_iteration = None if saved < 0 else saved
            self._save(job)
            report.seconds["save"] = time.perf_counter() - begin
        begin = time.perf_counter()
        phases = {phase: report.seconds.get(phase, 0.0) for phase in PHASES}
        timers.log(job.args, job.iteration, phases, level=1)  # which waits for all ranks
        report.seconds["writers"] = seconds = time.perf_counter() - begin
        progress(job.args.rank, f"writers  {seconds:7.3f} s  figures shown, all ranks waited for")
        stall_s = timers.longest(time.perf_counter() - job.stopped_s)
        self._done(job, report, stall_s)
        if self._membership.leads and pending.posted.request is not None:
            answer = {
                "state": "done",
                "layout": report.target,
                "iteration": job.iteration,
                "stall_s": stall_s,
                "bytes_moved": report.bytes["moved"],
            }
            self._membership.answer(pending.posted.request, answer)
        return True

    def _last_checkpoint(self, job: Job) -> str:
        if self._saved_iteration is None:
            return ""
        return f" (iteration {self._saved_iteration} is saved in {job.args.save})"

    def _check_whole(self) -> None:
        """Nothing is trained on or saved once a switch has left no layout whole on this process."""
        if self._broken is not None:
            raise self._broken

    def _save(self, job: Job) -> None:
        """Write a checkpoint in the layout in force, as Megatron's loop does; collective.

        An iteration that is saved already is left alone: writing over a good checkpoint would leave
        none for a while. The checkpoint is then written one step later.
        """
        from megatron.training import get_timers, training

        if self._saved_iteration == job.iteration:
            self._save_pending = True
            progress(
                job.args.rank,
                f"iteration {job.iteration} was saved in the layout before; the checkpoint in "
                f"{job.layout} follows after the next step",
            )
            return
        # The host stops this timer while it saves; train() has it running, and starts it itself.
        timer = get_timers()("interval-time", log_level=0)
        between_trains = not timer._started
        if between_trains:
            timer.start()
        training.save_checkpoint_and_time(
            job.iteration,
            job.model,
            job.optimizer,
            job.scheduler,
            job.num_flops,
            job.checkpointing_context,
            train_data_iterator=job.iterators.train,
        )
        if between_trains:
            timer.stop()

    def _options(self) -> SwitchOptions:
        engine = self.config.engine
        return SwitchOptions(
            PlanOptions.of(engine),
            transport=engine.transport,
            verify=engine.verify.on(current_platform().device.type),
            keep_source=engine.keep_source,
            check_replicas=engine.check_replicas,
            topology=self._topology,
            connect_s=self.config.elastic.connect_timeout_s,
            decide_s=self.config.elastic.timeout_s,
            timeout_s=engine.timeout_s,
        )

    def _done(self, job: Job, report: SwitchReport, stall_s: float) -> None:
        progress(
            job.args.rank,
            f"iteration {job.iteration}: now {report.target}; no step ran for {stall_s:.3f} s, "
            f"{report.bytes['moved']} bytes moved (lower bound {report.bytes['lower_bound']})",
        )
        if job.args.rank == 0:
            fields = asdict(report)
            self.log.event("switch", **fields, ok=True, stall_s=stall_s)
        timers.log(job.args, job.iteration, {"stall": stall_s}, level=0)
        moved, peak = report.bytes["moved"], report.peak_extra_bytes
        self._figures.switched(report.seconds, moved, peak, stall_s)
        if writers.is_last(job.args):
            before = scalars.of_layout(ParallelLayout.parse(report.source))
            figures = scalars.of_switch(report.seconds, report.bytes, peak, stall_s)
            writers.write(job.iteration, {**before, **figures}, {})
            layout = {scalars.LAYOUT: report.target}
            writers.write(job.iteration + 1, scalars.of_layout(job.layout), layout)

    def _refused(self, job: Job, wanted: Any, refusal: DynaTrainError) -> None:
        """Say and note that a switch was refused, or begun and called off."""
        if job.built is None:
            print(f"[dynatrain] not taken into the job: {refusal}", flush=True)
            return
        what = "called off" if isinstance(refusal, SwitchAborted) else "refused"
        message = f"iteration {job.iteration}: switch {what}: {refusal}"
        progress(job.args.rank, message)
        self._figures.refused()
        if job.args.rank == 0:
            self.log.event(
                "refused",
                iteration=job.iteration,
                source=str(job.layout),
                target=layout_text(wanted),
                ok=False,
                called_off=isinstance(refusal, SwitchAborted),
                reason=getattr(refusal, "reason", str(refusal)),
                next_step=getattr(refusal, "next_step", ""),
            )
        if self.config.on_refusal is OnRefusal.fail:
            raise SystemExit(1)

    def _record_step(self, logged: dict[str, Any]) -> None:
        job = self.job
        if self._policy is not None:  # rank 0 may have no losses, but has what all ranks have
            self._metrics = {
                name: float(value)
                for name, value in (
                    *logged["loss_dict"].items(),
                    ("grad norm", logged["grad_norm"]),
                    ("learning rate", logged["learning_rate"]),
                )
                if value is not None
            }
        if job is None or not self.config.record_steps or job.args.rank != job.args.world_size - 1:
            return
        norm = logged["grad_norm"]
        self.log.step(
            iteration=logged["iteration"],
            loss=float(logged["loss_dict"]["lm loss"]) if logged["loss_dict"] else None,
            grad_norm=None if norm is None else float(norm),
            lr=logged["learning_rate"],
            consumed_samples=job.args.consumed_train_samples,
            layout=str(job.layout),
        )


def _end(message: str, rank: int) -> None:
    """End before any process group is made, with one message and the exit code for bad usage."""
    if rank == 0:
        sys.stderr.write(f"{message}\n")
    raise SystemExit(2)
