"""One training run with the plugin attached: what the hooks saw, and when to switch.

The session turns the host's calls into a :class:`Job` and the schedule into switches. A switch
leaves ``train`` by an exception raised at the step boundary, runs outside the ``except`` block (a
traceback would keep the old layout's frames alive) and enters ``train`` again, which goes on from
``args.iteration``.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dynatrain_megatron.adapters import groups
from dynatrain_megatron.adapters.arguments import LaunchArguments, layout_of
from dynatrain_megatron.adapters.batches import consumed_after
from dynatrain_megatron.adapters.built import Built, BuiltCache, BuiltKey
from dynatrain_megatron.adapters.handover import stay, sync_functions
from dynatrain_megatron.adapters.job import Iterators, Job, Recipe
from dynatrain_megatron.adapters.samplers import LaunchData
from dynatrain_megatron.adapters.skeleton import Skeleton
from dynatrain_megatron.config import (
    DynaTrainConfig,
    EnginePlacement,
    EnginePromote,
    OnRefusal,
    ScheduleStep,
    Verify,
)
from dynatrain_megatron.errors import LayoutError, SplitStateError, SwitchRefused
from dynatrain_megatron.layout import ParallelLayout, derive
from dynatrain_megatron.observe import RunLog, progress
from dynatrain_megatron.planner import PlanOptions, read_topology_file
from dynatrain_megatron.platform import current as current_platform
from dynatrain_megatron.transition import Target, check_request, switch
from dynatrain_megatron.transition.switch import SwitchOptions, SwitchReport

Original = Callable[..., Any]
Call = inspect.BoundArguments


class SwitchNow(BaseException):
    """Leaves ``train`` at a step boundary. Not an Exception: no handler of the host may eat it."""


@dataclass(frozen=True)
class _Due:
    """A switch that has passed every check, and the seconds that took."""

    step: ScheduleStep
    target: Target
    prepare_s: float


class Session:
    """State of one run; its ``on_…`` methods are what the hooks call, on every rank alike."""

    def __init__(self, config: DynaTrainConfig) -> None:
        """Raises ConfigError where the topology file is wrong."""
        self.config = config
        self._topology = None if config.topology == "auto" else read_topology_file(config.topology)
        self.log = RunLog(config.run_dir)
        self.job: Job | None = None
        self._pending: list[ScheduleStep] = list(config.steps())
        self._launch: LaunchArguments | None = None
        self._launch_layout: ParallelLayout | None = None
        self._baseline: Namespace | None = None
        self._pretrain: dict[str, Any] = {}
        self._setup: tuple[Original, Call] | None = None
        self._build_iterators: Original | None = None
        self._test_iterators: list[Any] = []
        self._totals: dict[str, Any] = {}
        self._num_entries = 0
        self._num_switches = 0
        self._boundary_s = 0.0
        self._due: _Due | None = None
        self._saved_iteration: int | None = None
        self._save_pending = False
        self._split: SplitStateError | None = None

    # -- before training ---------------------------------------------------------------------

    def on_validate_args(self, original: Original, call: Call) -> Any:
        """Keep the launch flags, then look at the whole schedule before anything is started."""
        parsed = call.arguments["args"]
        if self._launch is not None:
            return original(*call.args, **call.kwargs)
        if self.config.save_after_switch and not (parsed.save and parsed.save_interval):
            _end(
                "save_after_switch=true needs a directory for the checkpoints; add --save DIR and "
                "--save-interval N (Megatron asks for both) or leave save_after_switch out",
                parsed.rank,
            )
        launch = LaunchArguments.capture(parsed, call.arguments.get("defaults") or {})
        result = original(*call.args, **call.kwargs)
        args = parsed if result is None else result
        self._launch, self._baseline = launch, Namespace(**vars(args))
        self._launch_layout = layout_of(args, launch)
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
        for step in self._pending:
            try:
                source = check_request(
                    step.layout_changes,
                    launch=self._launch,
                    launch_layout=self._launch_layout,
                    source=source,
                    args=args,
                    consumed_samples=consumed_after(args, step.iteration),
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
        return original(*call.args, **call.kwargs)

    def on_setup(self, original: Original, call: Call) -> Any:
        if self._setup is None:
            self._setup = (original, call)
        return original(*call.args, **call.kwargs)

    def on_build_iterators(self, original: Original, call: Call) -> Any:
        built = original(*call.args, **call.kwargs)
        self._build_iterators = original
        self._test_iterators.append(built[2])
        return built

    # -- training ----------------------------------------------------------------------------

    def on_train(self, original: Original, call: Call) -> Any:
        """Run ``train``, and again after each switch, until it returns."""
        self._check_whole()
        job = self._first_job(call)
        if job is None:
            return original(*call.args, **call.kwargs)
        self.job = job
        current_platform().links()  # takes a while the first time: not when a switch waits for it
        while True:
            self._num_entries += 1
            functions = sync_functions(job.config)
            try:
                return original(*call.args, **call.kwargs)
            except SwitchNow:
                pass
            if not self._switch(job):
                stay(job, functions)
            call.arguments["train_data_iterator"] = job.iterators.train
            call.arguments["valid_data_iterator"] = job.iterators.valid

    def _first_job(self, call: Call) -> Job | None:
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
        key = BuiltKey.of(job.layout, args)
        job.built = Built(key, groups.capture(), Skeleton.of_launch(job), args)
        job.built.note_as_built()
        return job

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
        """Whether a switch begins here; an impossible one is refused without leaving the loop."""
        if not self._pending or job.iteration < self._pending[0].iteration:
            return False
        assert self._launch is not None and self._launch_layout is not None
        self._boundary_s = time.perf_counter()
        step = self._pending.pop(0)
        # A run that goes on from a checkpoint may have passed several: only the last one counts.
        while self._pending and job.iteration >= self._pending[0].iteration:
            step = self._pending.pop(0)
        try:
            target = check_request(
                step.layout_changes,
                launch=self._launch,
                launch_layout=self._launch_layout,
                source=job.layout,
                args=job.args,
                consumed_samples=job.args.consumed_train_samples,
            )
        except SwitchRefused as refusal:
            self._refused(job, step, refusal)
            return False
        if target.layout == job.layout:
            progress(job.args.rank, f"iteration {job.iteration}: already in layout {job.layout}")
            return False
        self._due = _Due(step, target, time.perf_counter() - self._boundary_s)
        return True

    def on_training_log(self, original: Original, call: Call) -> Any:
        """Make the log read as if ``train`` had never been left, and record the step."""
        if self._num_entries > 1:
            if "is_first_iteration" in inspect.signature(original).parameters:
                call.arguments["is_first_iteration"] = False
            call.arguments["total_loss_dict"] = self._totals
        else:
            self._totals = call.arguments["total_loss_dict"]
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
        """Do what is due at this boundary; False where the job stays in the old layout."""
        from megatron.training import get_timers

        assert self._due is not None
        due, self._due = self._due, None
        job.args.iteration = job.iteration
        job.args.num_floating_point_operations_so_far = job.num_flops
        for timer in get_timers()._timers.values():
            if timer._started:
                timer.stop()
        try:
            report = switch(job, due.target, self._options())
        except SwitchRefused as refusal:
            self._refused(job, due.step, refusal)
            return False
        except SplitStateError as error:
            self._split = error
            raise
        self._num_switches += 1
        report.seconds = {"prepare": due.prepare_s, **report.seconds}
        if self.config.save_after_switch:
            begin = time.perf_counter()
            self._save(job)
            report.seconds["save"] = time.perf_counter() - begin
        self._done(job, report, time.perf_counter() - self._boundary_s)
        return True

    def _check_whole(self) -> None:
        """Nothing is trained on or saved once a switch has left no layout with the whole state."""
        if self._split is not None:
            raise self._split

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
            PlanOptions(
                engine.staging_mib << 20,
                engine.window_ops,
                engine.schedule,
                relay=engine.promote is not EnginePromote.off,
            ),
            transport=engine.transport,
            verify=engine.verify is not Verify.off,
            keep_source=engine.keep_source,
            check_replicas=engine.check_replicas,
            topology=self._topology,
            placement=engine.placement is EnginePlacement.best,
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

    def _refused(self, job: Job, step: ScheduleStep, refusal: SwitchRefused) -> None:
        message = f"iteration {job.iteration}: switch refused: {refusal}"
        progress(job.args.rank, message)
        if job.args.rank == 0:
            self.log.event(
                "refused",
                iteration=job.iteration,
                source=str(job.layout),
                target=step.layout_changes
                if isinstance(step.layout_changes, str)
                else json.dumps(step.layout_changes),
                ok=False,
                reason=refusal.reason,
                next_step=refusal.next_step,
            )
        if self.config.on_refusal is OnRefusal.fail:
            raise SystemExit(1)

    def _record_step(self, logged: dict[str, Any]) -> None:
        job = self.job
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
