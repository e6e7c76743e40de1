"""Carries out a run: opens run folder, model, Ray, data plane and actors, trains, and closes all of it in reverse."""

from __future__ import annotations

import gc
import math
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

from ...actors.process.memory import gpu_sizes
from ...codecs.tokens.routes import RouteSpec
from ...dataplane.errors import DataPlaneError
from ...dataplane.factory import DataPlane, connect, open_data_plane
from ..advantages.estimators import build_advantages
from ..base_model.prepare import model_config, prepare_model
from ..cluster.calls import ActorFailed, DriverMeter
from ..cluster.gpu_bundles import reserve_places
from ..cluster.gpu_memory import decide_roles
from ..cluster.placement import PlacementRequest
from ..cluster.ray_cluster import Cluster, open_cluster
from ..cluster.rollout_specs import evaluation_plans, sampling
from ..cluster.run_actors import RunActors, start_actors
from ..cluster.weight_route import WeightRoute
from ..cluster.worker_specs import budget, with_packing
from ..config.checks import cautions, contradictions
from ..config.config import Config, with_run_dir
from ..errors import ConfigError, UserError
from ..grpo import steps as grpo
from ..grpo.checkpoints import Checkpoints
from ..grpo.controllers import open_feed, run_steps
from ..grpo.evaluation import BEST
from ..grpo.feed import PARTITION, Feed
from ..grpo.roles import BothResident, Roles, TakeTurns
from ..grpo.rollout_pool import RolloutPool
from ..grpo.stages import Stages
from ..grpo.weight_sync import WeightSync
from ..observe.data_plane_watch import DataPlaneWatch
from ..observe.metrics import REPLACED
from ..observe.progress import Progress
from ..observe.prometheus import RunEndpoint
from ..observe.report import LiveReport, write_report
from ..observe.reward_errors import RewardErrors
from ..observe.run_folder import RunFolder
from ..observe.start_times import StartTimes
from ..observe.trace import Tracer
from ..pool.tenant.membership import PoolMembership
from ..supervision.cleanup import remove_shared_memory
from ..supervision.heartbeat import Heartbeat
from ..supervision.stuck_run import read_actors, write_actors
from .checks.preflight import check_prompts, check_quickly
from .checks.trust_probe import distrust
from .restarts import blamed, lost_only_workers, lost_process
from .under_watchdog import WatchdogProcess, under_watchdog

CLOSE_TIMEOUT_S = 120.0
"""Seconds within which all processes of a run must have exited after it begins to close."""


def run_training(config: Config, *, resume: bool = False) -> Path:
    """Train according to `config` and return the path of the run folder. With `resume`, continue from the newest
    checkpoint in `run.dir`.

    If one of its processes dies, the run restarts from its newest checkpoint by itself, up to `run.max_restarts` times.
    Raises UserError if the user made a mistake, ActorFailed or DataPlaneError if a process died, failed or hung, and
    RunStuck if the watchdog stopped the run. In every case, the processes, shared memory and ports of the run are gone
    afterwards.
    """
    return go_on_training(config, resume=resume, cluster=None, times=StartTimes())


def go_on_training(config: Config, *, resume: bool, cluster: Cluster | None, times: StartTimes) -> Path:
    """Do what `run_training` does, in a start that has begun. cluster: a Ray cluster that this process has started for
    the run, which the caller closes; None opens one. times: times of the start so far."""
    config = with_run_dir(config)
    problems = contradictions(config)  # a config that was built in Python has not been checked by the loader
    if problems:
        raise ConfigError(problems)
    check_quickly(config, resume=resume)
    times.mark("checks")
    with RunFolder(config, resume=resume) as folder, RunEndpoint(config, folder.path) as endpoint:
        steps = config.algorithm.steps
        if resume and (done := _steps_done(folder)) >= steps:
            print(
                f"nothing to do: the run in {folder.path} has {done} steps and its model; set algorithm.steps above "
                f"{done} to go on with it"
            )
            return folder.path
        with (
            Progress(config.run.name, steps, enabled=config.logging.progress, judged=config.judged_figure) as progress,
            under_watchdog(config, folder.path, cluster.processes() if cluster else ()) as watch,
        ):
            for line in cautions(config):
                progress.message(f"note: {line}")
            if endpoint.address:
                progress.message(f"metrics for Prometheus: {endpoint.address}")
            live_report = LiveReport(folder.path, 60 * config.logging.report_minutes)
            try:
                progress.doing = lambda: watch.heartbeat.stage
                with closing(live_report):
                    _Training(config, folder, endpoint, progress, watch, times, cluster, live_report).run(resume)
            finally:
                tell_how_to_go_on(folder, progress)
    return folder.path


def _steps_done(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint if the run has reached its end and exported its model, else 0."""
    checkpoints = Checkpoints(folder.checkpoints_dir)
    return checkpoints.latest_state().step if (folder.path / "model").is_dir() else 0


def tell_how_to_go_on(folder: RunFolder, progress: Progress) -> None:
    """Print the newest checkpoint's step and the command that continues the run from it, or that there is none. Prints
    nothing if the run has not begun."""
    try:
        step = Checkpoints(folder.checkpoints_dir).latest_state().step
    except UserError:
        if folder.metrics.begun and not folder.metrics.finished:
            progress.message(f"{folder.path} has no checkpoint, so this run cannot be continued")
        return
    except OSError:  # the failed disk was already reported
        return
    progress.message(f"to go on from the checkpoint of step {step}: headrace train {folder.config_path} --resume")


class _Training:
    """One call of `run_training`. Launches the run's processes, and launches them again after one was lost, as often as
    run.max_restarts allows."""

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
        self._cluster = cluster
        """Open Ray cluster for the first launch; None opens one."""
        self._times = times
        """Times of the next start; after a restart they count from there."""
        self._restarts = 0
        """Number of restarts from a checkpoint; counts against run.max_restarts."""
        self._replaced = 0
        """Number of actors that were replaced in all launches so far; counts against run.max_restarts."""
        self._died = ""
        """Sentence about the loss that caused the last restart; "" before the first restart."""
        self._begun = False
        """Whether any launch has reached its first step. An earlier failure causes no restart, because it would only
        happen again."""

    def run(self, resume: bool) -> None:
        """Train to the end and complete the run folder. With `resume`, begin at the newest checkpoint."""
        state = Checkpoints(self._folder.checkpoints_dir).latest_state() if resume else grpo.State()
        while True:
            lost = self._attempt(state)
            if lost is None:
                break
            gc.collect()  # handles of the Ray that is gone must not meet the next one
            state = self._go_back(lost)
        self._watch.heartbeat.enter("writing the report")
        self._tracer.write(self._folder.trace_path)
        self._folder.metrics.finish(state.step)
        self._live_report.close()
        write_report(self._folder.path)
        self._progress.message(f"report: {self._folder.report_path}")

    def _check_prompts(self) -> None:
        """Raise ConfigError if tokenizer or prompts cannot be used. A no-op once the run has begun."""
        if not self._begun:
            self._watch.heartbeat.enter("checking the prompts", math.inf)  # they may be on a slow disk
            check_prompts(self._config)

    def _prepare(self) -> str:
        """Return the model to start from, a local folder or hub id, after making it if need be."""
        self._watch.heartbeat.enter("preparing the model", math.inf)  # it may be warmed up for long
        model = prepare_model(self._config, self._folder, self._progress)
        self._progress.phase("building the actors")
        return model

    def _attempt(self, state: grpo.State) -> str | None:
        """Launch the processes and train from `state` to the end, updating `state`. Returns None at the end. If a
        process was lost and a restart is allowed, returns a sentence about the loss. Raises all other errors."""
        config, lost = self._config, None
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
                times=times,
            ) as run:
                self._tell_start(times, state)
                run.actors.replaced, run.actors.max_replaced = self._replaced, config.run.max_restarts - self._restarts
                try:
                    self._train(run, state)
                except Exception as error:  # judged while the other processes are still there
                    self._replaced = run.actors.replaced
                    cause = blamed(error, run.actors, needed_processes(self._folder.path))
                    lost = lost_process(cause)
                    if cause is error:
                        raise
                    raise cause from error
        except Exception as error:
            lost = lost or lost_process(error)
            left = config.run.max_restarts - self._restarts - self._replaced
            if lost is None or not self._begun or left <= 0 or self._watch.reason() is not None:
                raise
        return lost

    def _tell_start(self, times: StartTimes, state: grpo.State) -> None:
        """Write into the metrics, and tell the user, when each part of the start has ended."""
        times.mark("ready")
        self._folder.metrics.event("start", state.step, **times.figures())
        self._progress.message(str(times))

    def _tell_distrust(self, state: grpo.State, metrics: dict[str, float]) -> None:
        """Warn the user if the log-probs of engine and trainer differ too much in the first step."""
        has_experts = RouteSpec.of(SimpleNamespace(**model_config(self._config.model))) is not None
        warning = distrust(self._config, metrics, has_experts=has_experts)
        if warning is not None:
            self._progress.message(f"warning: {warning}")
            self._folder.metrics.event("distrust", state.step, note=warning)

    def _train(self, run: grpo.Run, state: grpo.State) -> None:
        config, folder = self._config, self._folder
        checkpoints = Checkpoints(folder.checkpoints_dir, keep=config.run.keep_checkpoints, warn=self._progress.message)
        self._endpoint.run.watch(run.watch)

        def replaced(died: str) -> None:
            folder.metrics.event(REPLACED, state.step, died=died)
            folder.incident(state.step, f"{died} (replaced)")

        run.actors.on_death.append(replaced)
        checkpoints.load(run, state)
        if state.step:
            grpo.sync_weights(run, state)
        if state.step or self._restarts:
            folder.resumed(state.step, died=self._died)

        first = state.step + 1

        def after_step(state: grpo.State, metrics: dict[str, float]) -> None:
            metrics["run/restarts"] = float(self._restarts)
            if state.step == first:
                self._tell_distrust(state, metrics)
            self._watch.mend()
            folder.metrics.log(state.step, metrics)
            self._endpoint.run.publish(state.step, metrics)
            self._progress.update(state.step, metrics)
            self._live_report.tick()
            if checkpoints.is_due(config.run, state.step):
                checkpoints.save(run, state)

        if not self._begun:
            placement = run.actors.placement
            if placement.num_gpus:
                self._progress.message(placement.sentence)
                folder.metrics.event("placement", state.step, note=placement.sentence)
            if run.roles_note:
                self._progress.message(run.roles_note)
            for note in run.actors.data_notes:
                self._progress.message(note)
                folder.metrics.event("data", state.step, note=note)
        self._begun = True
        feed = open_feed(run, state, PARTITION)
        run.roles.open_rollouts(lambda: feed)
        while True:
            try:
                run_steps(run, state, feed, after_step)
                break
            except KeyboardInterrupt:
                self._save_interrupted(run, state, checkpoints)
                raise
            except Exception as error:
                cause = blamed(error, run.actors, needed_processes(folder.path))
                if not isinstance(cause, ActorFailed) or not self._may_restart_workers(run, cause):
                    if cause is error:
                        raise
                    raise cause from error
                feed = self._restart_workers(run, state, feed, checkpoints, cause)
        self._progress.phase("saving the model")
        run.roles.to_training()
        checkpoints.finish(run, state)
        draft = folder.path / "model.new"
        shutil.rmtree(draft, ignore_errors=True)
        grpo.export_model(run, str(draft))
        shutil.rmtree(folder.path / "model", ignore_errors=True)  # of the run that this one resumed
        draft.rename(folder.path / "model")
        if config.run.keep_best and not (folder.path / BEST).exists():
            self._progress.message(f"best/: none, as no validation after the first had a higher {config.judged_figure}")

    def _save_interrupted(self, run: grpo.Run, state: grpo.State, checkpoints: Checkpoints) -> None:
        """Save a checkpoint of the last finished step after the run was interrupted. A no-op if no step is finished, if
        the weights are those of the middle of a step (an update of several, or one that was interrupted twice), if the
        run writes no checkpoints, or if it was the watchdog that stopped the run."""
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
            run.gather([worker.abort() for worker in run.workers], "interrupt")
            run.roles.make_room()
            run.roles.to_training()
            checkpoints.finish(run, state)
        except (ActorFailed, DataPlaneError) as error:
            self._progress.message(f"no checkpoint of step {state.step} could be saved: {error}")

    def _may_restart_workers(self, run: grpo.Run, error: ActorFailed) -> bool:
        """Return whether it is enough to restart the train workers. No other process may be lost, the run must keep a
        journal of the groups that they must train on again, and run.max_restarts must allow a restart."""
        if not self._config.run.keeps_journal or self._watch.reason() is not None:
            return False
        processes = needed_processes(self._folder.path)
        return run.actors.may_replace and lost_process(error) is not None and lost_only_workers(run, processes)

    def _restart_workers(
        self, run: grpo.Run, state: grpo.State, feed: Feed, checkpoints: Checkpoints, error: ActorFailed
    ) -> Feed:
        """Restart the train workers from the newest complete checkpoint, while rollouts in flight continue. Sets
        `state` back to that checkpoint, and returns a new feed to continue with.

        Engines keep the version that they serve; those without a complete version get the checkpoint's. Until the train
        workers have caught up with the engines, they train again on the groups since the checkpoint, which come from
        the journal.
        """
        earlier = self._go_back(f"{error}; the train workers alone are restarted, the rollouts go on")
        run.actors.max_replaced -= 1
        run.roles.make_room()
        with run.stages.timed("restarting the train workers", 3 * run.actors.start_timeout_s):  # three waits
            run.actors.restart_workers()
        run.weights.forget()
        checkpoints.load(run, earlier)
        state.go_back(earlier)
        run.rollouts.mend(state.version)
        feed.give_up()
        self._folder.resumed(state.step, died=self._died)
        return open_feed(run, state, f"{PARTITION}-{self._restarts}")

    def _go_back(self, lost: str) -> grpo.State:
        """Count and announce a restart. lost: sentence about the loss that caused it. Returns the state to continue
        from: that of the newest complete checkpoint, or of the run's start if there is none."""
        self._restarts += 1
        self._died = lost
        try:
            state = Checkpoints(self._folder.checkpoints_dir).latest_state()
        except UserError:
            state = grpo.State()
        where = f"the checkpoint of step {state.step}" if state.step else "the start, as there is no checkpoint yet"
        limit = f"run.max_restarts={self._config.run.max_restarts}"
        self._progress.message(f"{lost}\nrestart {self._restarts} ({limit}): going on from {where}")
        self._folder.incident(state.step, f"{lost} (restart {self._restarts}, going on from {where})")
        return state


@contextmanager
def launched(
    config: Config,
    prepare: Callable[[], str],
    tracer: Tracer,
    folder: Path,
    watch: WatchdogProcess | None = None,
    *,
    cluster: Cluster | None = None,
    check: Callable[[], None] = lambda: None,
    times: StartTimes | None = None,
) -> Iterator[grpo.Run]:
    """Context manager that starts Ray, the data plane and all actors, and yields a `Run` that is ready to train. On
    leaving, also after an error, it stops everything.

    prepare: function that returns the model, a local folder or hub id; it is called while the actors' processes start.
    watch: the watchdog, which gets the list of processes; None for a run without one. cluster: an open cluster, which
    is closed at the end; None opens one. check: function that raises an error if the run cannot work; it is called once
    the actors' processes are starting. times: told when each part of the start has ended.
    """
    run_id = uuid.uuid4().hex[:8]
    heartbeat = Heartbeat() if watch is None else watch.heartbeat
    times = times or StartTimes()
    start_s, request = config.resources.start_timeout_s, PlacementRequest.of(config)
    with ExitStack() as stack:
        stack.callback(remove_shared_memory, run_id)
        heartbeat.enter("starting Ray", start_s)
        cluster = cluster or open_cluster(config.resources, request, config.dataplane.store)
        stack.callback(cluster.close)
        meter = DriverMeter()
        membership, pids = None, list[int]()
        if config.pool.address is not None:
            membership = PoolMembership(config, folder, heartbeat)
            stack.callback(membership.leave, lambda: pids)
        ending_actors = ExitStack()
        stack.callback(ending_actors.close)
        heartbeat.enter("placing the actors", start_s)
        reservation = reserve_places(request, start_s) if membership is None else membership.places()
        placement = reservation.placement
        # Refuses a transport that cannot work before any actor starts.
        route = WeightRoute.of(config.sync, placement, pooled=request.pooled)
        decision = decide_roles(config, placement, min(gpu_sizes(), default=None))
        config = decision.applied_to(config)
        trainer = with_packing(config.trainer, config.model, gpu=placement.layout != "cpu")
        config = config.model_copy(update={"trainer": trainer})
        one_host = cluster.num_nodes == 1
        starting = start_actors(config, meter, ending_actors, reservation, route, one_host=one_host)
        check()
        heartbeat.enter("starting the data plane", start_s)
        plane = stack.enter_context(_opened(config, run_id, one_host=one_host))
        times.mark("data plane")
        client = connect(plane.handle, name="driver")
        stack.callback(client.close)
        stack.callback(ending_actors.close)  # once more, so that they end before the data plane, which they use
        if watch is not None:
            watch.opened(plane.handle)
        model = prepare()
        times.mark("model")
        heartbeat.enter("starting the actors", 4 * start_s)  # it makes four bounded waits, one after another
        actors = starting.build(model, plane, times, membership)

        def tell() -> None:
            write_actors(folder, run_id, everyone(plane, actors))
            pids[:] = [actor.info.pid for actor in actors.handles if actor.info.host == socket.gethostname()]
            if watch is not None:
                watch.started(actors)

        tell()
        actors.on_replaced.append(tell)
        meter.take()
        stack.callback(heartbeat.enter, "closing", CLOSE_TIMEOUT_S)
        cached = (decision.take_turns or membership is not None) and route.keeps_in_host
        weights = WeightSync(
            config.sync if membership is None else config.sync.model_copy(update={"cache": True}),
            actors.workers,
            actors.engines,
            lasting=route.lasting,
            in_cache=0 if cached else None,
        )
        stages = Stages(tracer, heartbeat)
        timeout_s = config.resources.stage_timeout_s
        roles: Roles = BothResident(weights)
        if decision.take_turns:
            roles = TakeTurns(
                actors,
                weights,
                stages,
                timeout_s=timeout_s,
                residual_bytes=config.resources.residual_mib << 20,
                bucket_bytes=route.send_buffer_bytes,
            )
        if membership is not None:
            progress = connect(plane.handle, name="pool")
            stack.callback(progress.close)
            roles = membership.roles(actors, weights, stages, progress, route.send_buffer_bytes)
            stack.callback(membership.tenant.stop)
        yield grpo.Run(
            config=config,
            client=client,
            actors=actors,
            rollouts=RolloutPool(actors, roles, stages, timeout_s),
            weights=weights,
            roles=roles,
            roles_note=decision.why,
            stages=stages,
            meter=meter,
            watch=DataPlaneWatch(client),
            reward_errors=RewardErrors(folder),
            estimate=build_advantages(config.advantage, config.reward.weights),
            sampling=sampling(config.rollout, n=config.algorithm.group_size, seed=config.run.seed),
            evaluations=evaluation_plans(config),
            budget=budget(config.trainer, config.model),
        )


def _opened(config: Config, run_id: str, *, one_host: bool) -> DataPlane:
    """Open the run's data plane. Raises UserError if a host cannot provide what the configuration asks for."""
    try:
        return open_data_plane(
            config.dataplane.with_sampler(config.resolved_sampler),
            run_id=run_id,
            one_host=one_host,
            start_timeout_s=config.resources.start_timeout_s,
        )
    except DataPlaneError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


def everyone(plane: DataPlane, actors: RunActors) -> list[tuple[str, int, str]]:
    """Return (name, process id, host) of every process of the run."""
    hosts = [(name, pid, plane.host) for name, pid in plane.processes().items()]
    return hosts + [(handle.info.name, handle.info.pid, handle.info.host) for handle in actors.handles]


def needed_processes(folder: Path) -> dict[str, int]:
    """Return the run's processes on this host, read from actors.json in the run folder: name -> process id."""
    return {actor.name: actor.pid for actor in read_actors(folder) if actor.here}
