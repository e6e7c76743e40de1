"""Carries out a run: opens its folder, launches its processes, trains, and restarts after the loss of a process."""

from __future__ import annotations

import gc
import math
import shlex
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ...dataplane.errors import DataPlaneError
from ..base_model.prepare import check_model, model_has_experts, prepare_base, prepare_model
from ..cluster.calls import ActorFailed
from ..cluster.ray_cluster import Cluster
from ..cluster.start_times import StartTimes
from ..config.checks import cautions, contradictions
from ..config.config import Config, with_run_dir
from ..elastic.scaling import ScaledEngines
from ..errors import ConfigError, UserError
from ..grpo.checkpoints import Checkpoints, NoCheckpoint, State, refuse_changed_objects
from ..grpo.feed import PARTITION, Feed
from ..grpo.run_parts import Run
from ..grpo.step_warnings import StepWarnings
from ..grpo.training_modes import AfterStep, interrupts_held, open_feed, run_steps
from ..observe.pages.report import LiveReport, write_report
from ..observe.progress import Progress
from ..observe.prometheus import RunEndpoint
from ..observe.run_folder import BEST, RunFolder
from ..observe.trace import Tracer
from .checks.preflight import check_start
from .checks.trust_probe import distrust
from .processes import launched
from .restarts import (
    lost_only_rows,
    lost_only_workers,
    lost_process,
    needed_processes,
    no_start,
    room_again,
    root_cause,
)
from .supervised_start import warm_up, warmup_sections
from .under_watchdog import StepSize, WatchdogProcess, under_watchdog


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that has happened in a run: the end of a step, or a checkpoint that is complete."""

    kind: Literal["step", "checkpoint"]
    step: int
    """Number of the step; 0 for the evaluation of the initial model."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the step and of its evaluations, by name; empty for a checkpoint."""
    path: Path | None = None
    """Folder of the checkpoint; None for a step."""


Events = Generator[RunEvent, str | None, None]
"""Events of a run, which goes on when the next one is asked for. A text that is sent ends the run early and in good
order: with a checkpoint, from which it can be resumed, and with its model."""
RunOfEvents = Generator[RunEvent, str | None, Path]
"""Events of a whole run, which returns its folder."""
USERS_CODE = "code of the caller"
"""Stage of a run whose events are looked at, in which it waits without a time limit."""


def run_training(config: Config, *, resume: bool = False) -> Path:
    """Train according to `config` and return the path of the run folder. With `resume`, continue from the newest
    checkpoint in `run.dir`.

    If one of its processes dies, the run restarts from its newest checkpoint by itself, up to `run.max_restarts` times.
    Raises UserError if the user made a mistake, ActorFailed or DataPlaneError if a process died, failed or hung, and
    RunStuck if the watchdog stopped the run. The processes, shared memory and ports of the run are always released
    afterwards.
    """
    return to_end(training(config, resume=resume, cluster=None, times=StartTimes()))


def to_end(events: RunOfEvents) -> Path:
    """Let a run go on to its end, and return its folder."""
    while True:
        try:
            next(events)
        except StopIteration as end:
            return end.value


def training(
    config: Config, *, resume: bool, cluster: Cluster | None, times: StartTimes, allow_changed: bool = True
) -> RunOfEvents:
    """Continue the start of a run that has begun, train as `run_training` does, and yield the events of the run.

    cluster: a Ray cluster that this process has started for the run and that the caller closes; None opens one. times:
    times of the start so far. allow_changed: whether a resumed run may have other objects of a script or notebook than
    its checkpoint; else UserError is raised.
    """
    config = with_run_dir(config)
    problems = contradictions(config)  # The loader has not checked a configuration that was built in Python.
    if problems:
        raise ConfigError(problems)
    check_start(config, resume=resume, part="quick")
    if resume and not allow_changed:
        refuse_changed_objects(Checkpoints(Path(config.run.dir or "") / "checkpoints").latest_state(), config.objects)
    times.mark("checks")
    with (
        RunFolder(config, resume=resume) as folder,
        RunEndpoint(config.run.name, config.judged_figure, config.logging, folder.path) as endpoint,
    ):
        steps, size = config.algorithm.steps, StepSize(config.algorithm.prompts_per_step, config.rows_per_group)
        if resume and (done := _steps_done(folder)) >= steps:
            print(
                f"nothing to do: the run in {folder.path} has {done} steps and its model; set algorithm.steps above "
                f"{done} to continue it"
            )
            return folder.path
        if config.warmup.on_file:
            own = config.warmup, config.run, config.model, config.sft, config.trainer
            changed = warmup_sections(*own, folder.path)
            sections = config.model_copy(update=changed).model_dump()
            warm_up(sections, folder.path, run_training)
        with (
            Progress(config.run.name, steps, enabled=config.logging.progress, judged=config.judged_figure) as progress,
            under_watchdog(config.resources, folder.path, size, cluster.processes() if cluster else ()) as watch,
        ):
            window = config.overlap.window
            for line in cautions(config.algorithm, config.loss, config.trainer, config.rollout, window=window):
                progress.message(f"note: {line}")
            if endpoint.address:
                progress.message(f"metrics for Prometheus: {endpoint.address}")
            live_report = LiveReport(folder.path, 60 * config.logging.report_minutes)
            try:
                progress.doing = lambda: watch.heartbeat.stage
                with closing(live_report):
                    yield from _Training(config, folder, endpoint, progress, watch, times, cluster, live_report).run(
                        resume
                    )
            finally:
                tell_how_to_go_on(folder, progress, "sft" if config.sft.train else "train")
    return folder.path


def _steps_done(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint if the run has reached its end and exported its model, else 0."""
    checkpoints = Checkpoints(folder.checkpoints_dir)
    return checkpoints.latest_state().step if (folder.path / "model").is_dir() else 0


def tell_how_to_go_on(folder: RunFolder, progress: Progress, verb: str = "train") -> None:
    """Print the step of the newest checkpoint and the command that continues the run, or that there is no checkpoint.
    Prints nothing if the run has not begun. verb: command of Headrace that began the run."""
    try:
        step = Checkpoints(folder.checkpoints_dir).latest_state().step
    except NoCheckpoint:
        if folder.metrics.begun and not folder.metrics.finished:
            progress.message(f"{folder.path} has no checkpoint, so this run cannot be continued")
        return
    except (OSError, UserError):  # The failure of the disk, or the damage, was already reported.
        return
    command = f"headrace {verb} {shlex.quote(str(folder.config_path))} --resume"
    if folder.metrics.finished:
        progress.message(f"to train longer, with N above {step}: {command} algorithm.steps=N")
        return
    progress.message(f"to continue from the checkpoint of step {step}: {command}")


def _events(step: int, metrics: dict[str, float], checkpoints: Checkpoints) -> Iterator[RunEvent]:
    """Yield the end of a step, and the checkpoints that are complete by now."""
    yield RunEvent("step", step, MappingProxyType(metrics))
    yield from _saved(checkpoints)


def _saved(checkpoints: Checkpoints) -> Iterator[RunEvent]:
    while checkpoints.completed:
        step = checkpoints.completed.pop(0)
        yield RunEvent("checkpoint", step, path=checkpoints.path_of(step))


class _Training:
    """One call of `run_training`. Launches the run's processes, and relaunches them after a loss, at most
    run.max_restarts times."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        endpoint: RunEndpoint,
        progress: Progress,
        watch: WatchdogProcess,
        times: StartTimes,
        cluster: Cluster | None,
        live_report: LiveReport,
    ) -> None:
        self._live_report = live_report
        self._config = config
        self._folder = folder
        self._endpoint = endpoint
        self._progress = progress
        self._watch = watch
        self._tracer = Tracer(config.traced_step, config.run.trace_num_steps, folder.trace_path)
        self._engines = ScaledEngines(folder.path, progress.message)
        self._cluster = cluster
        """Open Ray cluster for the first launch; None opens one."""
        self._times = times
        """Times of the next start; after a restart they count from there."""
        self._restarts = 0
        """Number of restarts from a checkpoint; counts against run.max_restarts."""
        self._replaced = 0
        """Number of actors that were replaced in all launches so far; counts against run.max_restarts."""
        self._notes = list[str]()
        """Sentences for the user about the prompts."""
        self._died = ""
        """Sentence about the loss that caused the last restart; "" before the first restart."""
        self._stopped: str | None = None
        """Reason for which the receiver of the events ends the run early; None while it goes on."""
        self._logged = 0
        """Last step whose metrics were logged."""
        self._patience = None
        """Wait for room in the Ray cluster in the next launch; None before the first one."""
        self._begun = False
        """Whether any launch has reached its first step. An earlier failure causes no restart, because it would only
        happen again."""

    def run(self, resume: bool) -> Events:
        """Train to the end and complete the run folder. With `resume`, begin at the newest checkpoint."""
        state = Checkpoints(self._folder.checkpoints_dir).latest_state() if resume else State()
        while True:
            lost = yield from self._attempt(state)
            if lost is None:
                break
            gc.collect()  # Handles of the ended Ray must be deleted before the next Ray starts.
            state = self._go_back(lost)
        self._watch.heartbeat.enter("writing the report")
        early = self._stopped and state.step < self._config.algorithm.steps
        self._folder.metrics.finish(state.step, **({"stopped": self._stopped} if early else {}))
        self._live_report.close()
        try:
            self._tracer.write(self._folder.trace_path)
            write_report(self._folder.path)
        except (OSError, UserError) as error:  # The run has ended well, with its model.
            self._progress.message(f"report.html could not be built: {error}")
        else:
            self._progress.message(f"report: {self._folder.report_path}")

    def _check_prompts(self) -> None:
        """Raise ConfigError if tokenizer or prompts cannot be used. A no-op once the run has begun."""
        if not self._begun:
            # There is no time limit, because the prompts can be on a slow disk.
            self._watch.heartbeat.enter("checking the prompts", math.inf)
            read = check_start(self._config, part="prompts")
            self._notes = [*read.notes, *read.changed_since(self._folder.path)]

    def _prepare(self) -> str:
        """Return the model to start from, a local folder or hub id. Makes the built-in model, and the rounded base of
        an adapter, if necessary."""
        # There is no time limit, because the warm-up can take long.
        self._watch.heartbeat.enter("preparing the model", math.inf)
        config = self._config
        check_model(config)
        model = prepare_model(config.model, config.warmup, config.run.seed, self._folder, self._progress)
        model = prepare_base(model, config.trainer.lora, self._folder, self._progress)
        self._progress.phase("building the actors")
        return model

    def _attempt(self, state: State) -> Generator[RunEvent, str | None, str | None]:
        """Launch the processes and train from `state` to the end, updating `state`. Returns None at the end. If a
        process was lost and a restart is allowed, returns a sentence about the loss. Raises all other errors."""
        rollout, lost, starts_again = self._engines.at_start(self._config.rollout), None, self._patience is not None
        config = self._config.model_copy(update={"rollout": rollout})
        self._progress.phase("starting Ray, data plane and actors")
        try:
            times, self._times = self._times, StartTimes()
            cluster, self._cluster = self._cluster, None
            with launched(
                config,
                self._prepare,
                self._tracer,
                self._folder.path,
                self._watch,
                cluster=cluster,
                check=self._check_prompts,
                tell=self._progress.message,
                times=times,
                patience=self._patience,
            ) as run:
                starts_again = False
                self._patience = room_again(run.actors, self._progress.message)
                times.mark("ready")
                self._folder.metrics.event("start", state.step, **times.figures())
                self._progress.message(str(times))
                run.actors.replaced, run.actors.max_replaced = self._replaced, config.run.max_restarts - self._restarts
                try:
                    yield from self._train(run, state)
                except Exception as error:  # The cause must be found while the other processes still run.
                    self._replaced = run.actors.replaced
                    cause = root_cause(error, run.actors, needed_processes(self._folder.path))
                    lost = lost_process(cause)
                    if cause is error:
                        raise
                    raise cause from error
        except Exception as error:
            lost = lost or lost_process(error)
            left = config.run.max_restarts - self._restarts - self._replaced
            if starts_again and isinstance(error, UserError):  # It is no mistake, because the same start was possible.
                raise no_start(error) from error
            if lost is None or not self._begun or left <= 0 or self._watch.reason() is not None:
                raise
        return lost

    def _tell_distrust(self, state: State, metrics: dict[str, float]) -> None:
        config, experts = self._config, model_has_experts(self._config.model)
        sides = config.model, config.rollout, config.trainer
        warning = distrust(*sides, config.router_replay, metrics, has_experts=experts)
        if warning is not None:
            self._progress.message(f"warning: {warning}")
            self._folder.metrics.event("distrust", state.step, note=warning)

    def _train(self, run: Run, state: State) -> Events:
        """Train from `state` to the end, and export the model. Restarts only the train workers if that is enough."""
        folder = self._folder
        checkpoints = Checkpoints(folder.checkpoints_dir, self._config.run, warn=self._progress.message)
        self._endpoint.run.watch(run.observers.watch)
        state.objects = self._config.objects

        def replaced(died: str) -> None:
            folder.replaced(state.step, died)

        def away(sentence: str) -> None:
            self._progress.message(sentence)
            folder.incident(state.step, sentence)

        run.actors.on_death.append(replaced)
        run.actors.on_away.append(away)
        self._engines.begin(run)
        run.observers.evaluated.append(self._progress.evaluated)
        checkpoints.load(run.workers, run.rollouts, state)
        self._logged = state.step
        if state.step or state.version > self._config.first_version:
            run.rollouts.sync_weights(state.version)
        if state.step or self._restarts:
            folder.resumed(state.step, died=self._died)
        if not self._begun:
            self._tell_notes(run, state)
        self._begun = True
        after_step = self._after_step(run, checkpoints, first=state.step + 1)
        feed = open_feed(run, state, PARTITION)
        run.roles.open_rollouts(lambda: feed)
        while True:
            try:
                with closing(run_steps(run, state, feed, after_step)) as steps:
                    for metrics in steps:
                        yield from self._tell(run, _events(state.step, metrics, checkpoints))
                        if self._stopped is not None:
                            break
                        if run.observers.watch.lost_rows:
                            feed.make_lost_again()
                break
            except KeyboardInterrupt:
                self._save_interrupted(run, state, checkpoints)
                raise
            except Exception as error:
                cause = root_cause(error, run.actors, needed_processes(folder.path))
                if self._may_repeat_step(run, state, error):
                    feed = self._repeat_step(run, state, feed, checkpoints, cause)
                elif isinstance(cause, ActorFailed) and self._may_restart_workers(run, cause):
                    feed = self._restart_workers(run, state, feed, checkpoints, cause)
                elif cause is error:
                    raise
                else:
                    raise cause from error
        self._finish(run, state, checkpoints)
        yield from self._tell(run, _saved(checkpoints))

    def _tell(self, run: Run, events: Iterator[RunEvent]) -> Events:
        """Yield events, between which the caller can take any time."""
        for event in events:
            run.stages.heartbeat.enter(USERS_CODE, math.inf)
            try:
                reason = yield event
            finally:  # An error of the caller arrives here, and the end of the run has time limits again.
                run.stages.heartbeat.leave()
            self._stopped = self._stopped or reason

    def _after_step(self, run: Run, checkpoints: Checkpoints, first: int) -> AfterStep:
        """Return the callback that logs, shows and saves each completed step. first: number of the first step."""
        warnings = StepWarnings()

        def after_step(state: State, metrics: dict[str, float]) -> None:
            if state.step == first:
                self._tell_distrust(state, metrics)
            self._watch.replace_if_dead()
            self._log(state.step, metrics)
            self._endpoint.run.publish(state.step, metrics)
            self._progress.update(state.step, metrics)
            for kind, text in warnings.of(state.step, metrics).items():
                self._progress.message(f"warning: step {state.step}: {text}")
                self._folder.metrics.event("warning", state.step, kind=kind, note=text)
            self._live_report.tick()
            if checkpoints.is_due(state.step):
                checkpoints.save(run.workers, run.rollouts, state)

        return after_step

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step. An interrupt comes before the line or after it is noted, so none is twice."""
        metrics["run/restarts"] = float(self._restarts)
        with interrupts_held():
            self._folder.metrics.log(step, metrics)
            self._logged = step

    def _tell_notes(self, run: Run, state: State) -> None:
        placement = run.actors.placement
        if placement.num_gpus:
            self._progress.message(placement.sentence)
            self._folder.metrics.event("placement", state.step, note=placement.sentence)
        if run.roles_note:
            self._progress.message(run.roles_note)
        for note in dict.fromkeys((*self._notes, *run.actors.notes)):
            self._progress.message(f"note: {note}")
            self._folder.metrics.event("data", state.step, note=note)

    def _finish(self, run: Run, state: State, checkpoints: Checkpoints) -> None:
        folder = self._folder.path
        self._progress.phase("saving the model")
        run.roles.to_training()
        checkpoints.finish(run.workers, run.rollouts, state)
        # The export replaces an earlier model in the folder of a resumed run.
        run.workers.export_model(folder / "model")
        if self._config.run.keep_best and not (folder / BEST).exists():
            judged = self._config.judged_figure
            self._progress.message(f"best/: none, as no validation after the first had a higher {judged}")

    def _save_interrupted(self, run: Run, state: State, checkpoints: Checkpoints) -> None:
        """Save a checkpoint of the last finished step after the run was interrupted. A no-op if no step is finished, if
        the run writes no checkpoints, or if the watchdog stopped the run. Also a no-op if the weights are from the
        middle of a step, after one of several updates or after a second interrupt."""
        if self._watch.reason() is not None or not self._config.run.saves_checkpoints:
            return
        if not state.step:
            return
        if state.ahead:
            self._progress.message(f"interrupted amid the updates of step {state.step + 1}, so no checkpoint is saved")
            return
        self._progress.message(
            f"interrupted: saving a checkpoint of step {state.step} (interrupt again to stop at once)"
        )
        try:
            if self._logged != state.step:  # The line comes first: a resumed run counts none that no checkpoint covers.
                self._log(state.step, state.figures)
            run.workers.gather([worker.abort() for worker in run.workers.handles], "interrupt")
            run.roles.end_generation()
            run.roles.to_training()
            checkpoints.finish(run.workers, run.rollouts, state)
        except (ActorFailed, DataPlaneError) as error:
            self._progress.message(f"no checkpoint of step {state.step} could be saved: {error}")

    def _may_restart_workers(self, run: Run, error: ActorFailed) -> bool:
        """Return whether it is enough to restart the train workers. This requires that no other process is lost, that
        the run keeps a journal of the groups since the checkpoint, and that run.max_restarts allows a restart."""
        if not self._config.run.keeps_journal or self._watch.reason() is not None:
            return False
        processes = needed_processes(self._folder.path)
        return (
            run.actors.may_replace
            and lost_process(error) is not None
            and lost_only_workers(run.actors, run.client, processes)
        )

    def _may_repeat_step(self, run: Run, state: State, error: Exception) -> bool:
        """Return whether it is enough to make the rows of the open step again. This requires that only rows are lost,
        that the step has not changed the weights, and that run.max_restarts allows a restart."""
        if not state.step or state.step != self._logged:
            return False  # The metrics of a step would be missing, or those of step 0 would be there twice.
        if state.ahead or self._watch.reason() is not None:
            return False
        return run.actors.may_replace and lost_only_rows(error, run)

    def _repeat_step(self, run: Run, state: State, feed: Feed, checkpoints: Checkpoints, error: Exception) -> Feed:
        """Begin the open step again after its rows were lost with a process of the store. Returns a new feed, which
        issues all prompts again that were in flight or claimed; the journal has the groups that were finished."""
        self._restarts += 1
        run.actors.max_replaced -= 1
        lost = f"{error}; the rows of step {state.step + 1} are made again"
        self._progress.message(lost)
        self._folder.incident(state.step, lost)
        try:
            run.actors.ensure_units()
            feed.give_up()
        except KeyboardInterrupt:  # The weights are still those of the last step.
            self._save_interrupted(run, state, checkpoints)
            raise
        return open_feed(run, state, f"{PARTITION}-{self._restarts}")

    def _restart_workers(
        self, run: Run, state: State, feed: Feed, checkpoints: Checkpoints, error: ActorFailed
    ) -> Feed:
        """Restart the train workers from the newest complete checkpoint, while rollouts in flight continue. Sets
        `state` back to that checkpoint, and returns a new feed to continue with.

        Engines keep the version that they serve; engines without a complete version get that of the checkpoint. Until
        the train workers have caught up with the engines, they repeat the training on the groups since the checkpoint,
        from the journal.
        """
        earlier = self._go_back(f"{error}; the train workers alone are restarted, the rollouts go on")
        run.actors.max_replaced -= 1
        run.roles.end_generation()
        # The restart has three consecutive waits, each with its own time limit.
        with run.stages.timed("restarting the train workers", 3 * run.actors.start_timeout_s):
            notes = run.actors.restart_workers()
        for note in notes:
            self._folder.incident(earlier.step, note)
            if "because" in note:  # An engine could not give the base, or has a damaged one.
                self._progress.message(f"warning: {note}")
        run.weights.forget()
        checkpoints.load(run.workers, run.rollouts, earlier)
        state.go_back(earlier)
        self._logged = state.step
        run.rollouts.sync_broken(state.version)
        feed.give_up()
        self._folder.resumed(state.step, died=self._died)
        return open_feed(run, state, f"{PARTITION}-{self._restarts}")

    def _go_back(self, lost: str) -> State:
        """Count and announce a restart. lost: sentence about the loss that caused it. Returns the state to continue
        from: that of the newest complete checkpoint, or of the run's start if there is none."""
        self._restarts += 1
        self._died = lost
        try:
            state = Checkpoints(self._folder.checkpoints_dir).latest_state()
        except NoCheckpoint:
            state = State()
        where = f"the checkpoint of step {state.step}" if state.step else "the start, as there is no checkpoint yet"
        limit = f"run.max_restarts={self._config.run.max_restarts}"
        self._progress.message(f"{lost}\nrestart {self._restarts} ({limit}): going on from {where}")
        self._folder.incident(state.step, f"{lost} (restart {self._restarts}, going on from {where})")
        return state
