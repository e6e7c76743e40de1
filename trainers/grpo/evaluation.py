"""Evaluates the policy on prompts that are never trained on: validation, and named sets, when they are due.

    start: each rollout actor gets a part of the prompts -> samples and scores -> sums of metrics -> means

An evaluation blocks the run, or runs in the background. In the background it ends before the next update of the
weights, or takes as long as it needs; its samples then come from the versions between `version_first` and
`version_last`.

Validation also keeps the best model and ends the run at its target; `validation.metric` names the metric that decides.
The validation before step 1 only sets the value that later ones must exceed: the initial model is never exported, and
neither is one that equals the best so far.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...actors.process.json_lines import replace_file
from ...actors.rollout.evaluation_metrics import EXACT_MATCH, FigureSums, needs_answers
from ...actors.rollout.results import EvaluationReport
from ..cluster.calls import ActorFailed, Call, ended
from ..cluster.handles import RolloutHandle
from ..cluster.rollout_specs import VALIDATION, EvaluationPlan
from ..config.config import RunConfig
from ..config.evaluation_sets import ValidationConfig
from ..errors import UserError
from ..observe.run_folder import BEST
from .checkpoints import State
from .feed import LOOK_AFTER_S
from .rollout_pool import RolloutPool
from .train_workers import TrainWorkers

_log = logging.getLogger(__name__)
OnEnd = Callable[[int, Mapping[str, float | None]], None]


class Evaluation:
    """Runs the evaluations of one set of prompts, one at a time."""

    def __init__(self, rollouts: RolloutPool, plan: EvaluationPlan, on_end: Sequence[OnEnd] = ()) -> None:
        """Prepare the evaluations of one set. on_end: functions that are called with the step and the metrics of each
        evaluation as soon as it has ended."""
        self._rollouts = rollouts
        self._on_end = on_end
        self.plan = plan
        self._calls: list[tuple[RolloutHandle, Call[EvaluationReport]]] = []
        self._reports: list[EvaluationReport] = []
        self._state = State()
        """Step and version of the policy that is evaluated."""
        self._started = 0.0

    @property
    def running(self) -> bool:
        """True while the metrics of a started evaluation have not been returned."""
        return bool(self._calls)

    @property
    def step(self) -> int:
        """Step of the policy that the latest evaluation measures."""
        return self._state.step

    def start(self, state: State) -> None:
        """Start an evaluation of the policy of `state`, which all engines must serve, in the background. Engines answer
        its prompts along with all other requests."""
        assert not self._calls, "one evaluation of a set at a time"
        plan, rollouts = self.plan, self._rollouts.active
        self._calls = [
            (rollout, rollout.evaluate(plan.name, part, len(rollouts), plan.sampling, plan.in_flight))
            for part, rollout in enumerate(rollouts)
        ]
        self._reports = []
        self._state = State(state.step, state.version)
        self._started = time.perf_counter()

    def poll(self, version: int) -> dict[str, float]:
        """Return the metrics of the evaluation that `start` began, or {} while it continues. version: version that the
        train workers have. Raises as `finish` does."""
        self._take(0.0, version)
        return self._metrics() if self._reports and not self._calls else {}

    def finish(self, version: int) -> dict[str, float]:
        """Wait for the evaluation that `start` began; returns its metrics, or {} when there is none. version: version
        of the train workers' weights; actors that replace others serve it.

        The wait lasts for as long as the actors make progress. An actor that dies, or makes no progress for
        resources.stage_timeout_s, is replaced, and its part of the prompts is evaluated again. Raises ActorFailed when
        an actor fails otherwise.
        """
        if not self._calls:
            return {}
        pool = self._rollouts
        with pool.stages.timed("validate"):
            pool.begin_watch()
            while self._calls:
                if self._take(LOOK_AFTER_S, version):
                    pool.stages.report_progress()
                if pool.look(version):
                    pool.stages.report_progress()
                self._end_stuck(self._calls)
        return self._metrics()

    def evaluate(self, state: State) -> dict[str, float]:
        """Evaluate the policy of `state`, which all engines must serve, and return the metrics. Raises as `finish`
        does."""
        self.start(state)
        return self.finish(state.version)

    def withdraw(self, actor: RolloutHandle) -> None:
        """Send the calls of `actor`, which leaves the run, to another actor."""
        for index, (rollout, call) in enumerate(self._calls):
            if rollout is actor:
                other = self._rollouts.active[0]
                self._calls[index] = other, call.again(other)

    def _take(self, timeout_s: float, version: int) -> bool:
        """Take the reports of calls that have ended, and resend the calls of actors that died. The wait for the
        first report is at most `timeout_s`. Returns whether there were any."""
        pool = self._rollouts
        by_call = {call: rollout for rollout, call in self._calls}
        outcomes = ended(list(by_call), "evaluate", timeout_s)
        for call, outcome in outcomes:
            rollout = by_call.pop(call)
            if not isinstance(outcome, ActorFailed):
                self._reports.append(outcome)
                continue
            if outcome.died:
                pool.replace(rollout, call.pid, outcome, version)
            elif not pool.may_repeat(outcome, call.started, version):
                raise outcome
            if rollout not in pool.active:  # The new engine waits for the next sync.
                rollout = pool.active[0]
            by_call[call.again(rollout)] = rollout
        self._calls = [(rollout, call) for call, rollout in by_call.items()]
        return bool(outcomes)

    def _end_stuck(self, calls: Sequence[tuple[RolloutHandle, Call[EvaluationReport]]]) -> None:
        """Kill the actors that have made no progress for resources.stage_timeout_s. Their calls then fail like those of
        actors that died."""
        bound_s = self._rollouts.timeout_s
        for rollout, call in calls:
            if self._rollouts.still_s(rollout) >= bound_s and rollout.info.pid == call.pid:
                self._rollouts.end_stuck(rollout, f"without progress in {self.plan.name}")
                self._rollouts.begin_watch()  # Ray soon reports that the actor is gone.

    def _metrics(self) -> dict[str, float]:
        reports, self._reports = self._reports, []
        sums = FigureSums()
        for report in reports:
            for key, total in report.sums.items():
                sums.add(key, total, report.counts[key])
        rows, failed = (sum(getattr(report, name) for report in reports) for name in ("rows", "failed"))
        if failed:
            error = next(report.first_error for report in reports if report.failed)
            _log.warning("%s: %d of %d rows failed, the first one: %s", self.plan.name, failed, rows, error)
        figures = sums.means()
        self._judge(figures, failed)
        metrics = {**figures, **self._conditions(reports, failed)}
        for tell in self._on_end:
            tell(self._state.step, metrics)
        return metrics

    def _conditions(self, reports: Sequence[EvaluationReport], failed: int) -> dict[str, float]:
        version, key = self._state.version, self.plan.setup.prefix
        first = [report.first_version for report in reports if report.first_version >= 0]
        last = [report.last_version for report in reports]
        return {
            f"{key}/failed_rows": float(failed),
            f"{key}/step": float(self._state.step),
            f"{key}/version_first": float(min(first, default=version)),
            f"{key}/version_last": float(max([version, *last])),
            f"{key}/seconds": time.perf_counter() - self._started,
        }

    def _judge(self, figures: dict[str, float], failed: int) -> None:
        """Act on the figures of an evaluation that has ended. failed: number of failed rows."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The metric by which a run's validation compares policies, and the actions that a comparison triggers."""

    metric: str
    """Full key of the metric that measures how good a policy is."""
    asked: str
    """Value of `validation.metric`, the name of the metric as the user wrote it."""
    known: tuple[str, ...]
    """Keys of all metrics that `validation.metric` can name."""
    stop_at: float | None
    """Value of the metric at which the run ends; None if it ends after its steps."""
    keep_best: bool
    """True if the best model is exported."""
    folder: Path
    """The run folder."""

    @classmethod
    def of(cls, validation: ValidationConfig, run: RunConfig, known: Sequence[str], judged: str) -> Goal:
        """Return the goal of a run. known: keys that `validation.metric` can name. judged: full key of the metric that
        it names."""
        folder = Path(run.dir or ".")
        return cls(judged, validation.metric, tuple(known), validation.stop_at, run.keep_best, folder)


class Validation(Evaluation):
    """Runs the validations of a run, one at a time. A validation either blocks the run, or runs in the background of
    the next step until its optimizer step."""

    def __init__(
        self,
        rollouts: RolloutPool,
        plan: EvaluationPlan,
        workers: TrainWorkers,
        goal: Goal,
        on_end: Sequence[OnEnd] = (),
    ) -> None:
        """Read the value of the best model so far from the run folder. No value exists before a run's first
        validation."""
        super().__init__(rollouts, plan, on_end)
        self._workers = workers
        self._goal = goal
        self._folder = goal.folder
        self.reached = False
        """Whether the metric that `validation.metric` names has reached `validation.stop_at`."""
        self._best = self._best_before()

    def _best_before(self) -> float:
        """Return the best value that an earlier validation of this run has reached. Returns -inf if there is no such
        value, or if it belongs to another metric than the present `validation.metric`."""
        path = self._folder / f"{BEST}.json"
        best = json.loads(path.read_text()) if path.exists() else {}
        if best.get("metric") == self._goal.metric:
            return best["value"]
        if best:
            former = best.get("metric", EXACT_MATCH)
            _log.warning(
                "%s goes by %s, but validation.metric is now %s: the next better model replaces it",
                path, former, self._goal.metric,
            )  # fmt: skip
        return -math.inf

    def _conditions(self, reports: Sequence[EvaluationReport], failed: int) -> dict[str, float]:
        return {
            "val/failed_rows": float(failed),
            "val/version": float(self._state.version),
            "time/validate_s": time.perf_counter() - self._started,
        }

    def _judge(self, figures: dict[str, float], failed: int) -> None:
        """Keep the model if it is the best so far, and check whether the target is reached. Raises UserError when the
        validation does not yield the metric that `validation.metric` names."""
        goal = self._goal
        value = figures.get(goal.metric)
        if value is None and not failed:
            raise UserError(
                f"validation.metric: got {goal.asked!r}, a metric that this validation does not have"
                + (", as no validation prompt has an answer" if needs_answers(goal.metric) else "")
                + f", expected one of {', '.join(key for key in goal.known if key in figures)}"
            )
        if value is None:
            return  # The reward functions failed, so this policy has no value.
        target = goal.stop_at
        self.reached = self.reached or (target is not None and value >= target)
        if not goal.keep_best or value <= self._best:
            return
        self._best = value
        if self._state.step:
            with self._rollouts.trainer_at_work(self._state.version):
                self._workers.export_model(self._folder / BEST)
        best = {"metric": goal.metric, "value": value, "step": self._state.step, "version": self._state.version}
        replace_file(self._folder / f"{BEST}.json", json.dumps(best).encode())


class Evaluations:
    """All evaluations of a run."""

    def __init__(
        self,
        plans: Sequence[EvaluationPlan],
        rollouts: RolloutPool,
        workers: TrainWorkers,
        goal: Goal,
        on_end: Sequence[OnEnd] = (),
    ) -> None:
        self._rollouts = rollouts
        self._all = [
            Validation(rollouts, plan, workers, goal, on_end)
            if plan.name == VALIDATION
            else Evaluation(rollouts, plan, on_end)
            for plan in plans
        ]

    @property
    def reached(self) -> bool:
        """True once validation has reached the target that ends the run."""
        return any(isinstance(evaluation, Validation) and evaluation.reached for evaluation in self._all)

    def before_first_step(self, state: State) -> dict[str, float]:
        """Evaluate the initial policy; returns the metrics of the evaluations that the run waits for. Background
        evaluations of named sets continue during the first steps."""
        metrics: dict[str, float] = {}
        if not self._all or self._rollouts.ahead_of(state.version):
            return metrics
        for evaluation in self._all:
            evaluation.start(state)
            if evaluation.plan.awaited != "never":
                metrics |= evaluation.finish(state.version)
        return metrics

    def withdraw(self, actor: RolloutHandle) -> None:
        """Send the calls of `actor`, which leaves the run, to another actor."""
        for evaluation in self._all:
            evaluation.withdraw(actor)

    def before_update(self, state: State) -> dict[str, float]:
        """Wait for the evaluations that must end before their version is replaced; returns their metrics. Must be
        called before the train workers change their weights."""
        metrics: dict[str, float] = {}
        for evaluation in self._all:
            if evaluation.plan.awaited == "before_update":
                metrics |= evaluation.finish(state.version)
        return metrics

    def after_step(self, state: State, *, last: bool) -> dict[str, float]:
        """Start the evaluations of the policy of `state` that are due. Returns the metrics of evaluations that have
        ended since the last step. In the last step all are due, and the run waits for them."""
        metrics: dict[str, float] = {}
        # If rollouts serve a later version, the workers have returned to a checkpoint, and this policy was evaluated
        # before that.
        served = not self._rollouts.ahead_of(state.version)
        for evaluation in self._all:
            plan = evaluation.plan
            if evaluation.running:
                metrics |= evaluation.finish(state.version) if last else evaluation.poll(state.version)
            if not served or not (last or state.step % plan.every == 0):
                continue
            if evaluation.running:
                _log.warning(
                    "%s: the evaluation of step %d has not ended, so there is none of step %d (%s.every)",
                    plan.name, evaluation.step, state.step, plan.name,
                )  # fmt: skip
                continue
            evaluation.start(state)
            if last or plan.awaited == "at_once":
                earlier = {key: value for key, value in metrics.items() if key.startswith(f"{plan.setup.prefix}/")}
                if earlier:
                    figures = ", ".join(f"{key} {value:.4g}" for key, value in earlier.items())
                    _log.warning("%s: that of an earlier step ended with the last one: %s", plan.name, figures)
                metrics |= evaluation.finish(state.version)
        if self.reached:  # The run ends here.
            for evaluation in self._all:
                metrics |= evaluation.finish(state.version)
        return metrics
