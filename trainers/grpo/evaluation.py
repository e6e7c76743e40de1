"""Evaluates the policy on prompts that are never trained on, in one place for validation and for named sets.

    start: each rollout actor gets a part of the prompts -> samples and scores -> sums of metrics -> means

An evaluation blocks the run, or runs in the background: until the next update of the weights, or for as long as it
takes. Its samples then come from the versions between `version_first` and `version_last`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ...actors.rollout.evaluation_figures import FigureSums
from ...actors.rollout.report import EvaluationReport
from ..cluster.calls import ActorFailed, Call, ended
from ..cluster.evaluation_plans import EvaluationPlan
from ..cluster.handles import RolloutHandle
from .feed import LOOK_AFTER_S
from .steps import Run, State

_log = logging.getLogger(__name__)


class Evaluation:
    """Makes the evaluations of one set, one at a time."""

    def __init__(self, run: Run, plan: EvaluationPlan) -> None:
        self._run = run
        self.plan = plan
        self._calls: list[tuple[RolloutHandle, Call[EvaluationReport]]] = []
        self._reports: list[EvaluationReport] = []
        self._state = State()
        """Step and version of the policy that is evaluated."""
        self._started = 0.0

    @property
    def running(self) -> bool:
        """Whether an evaluation has started whose metrics were not returned yet."""
        return bool(self._calls)

    @property
    def step(self) -> int:
        """Step whose policy the last evaluation that was started is about."""
        return self._state.step

    def start(self, state: State) -> None:
        """Start an evaluation of the policy of `state`, which all engines must serve, in the background. Engines answer
        its prompts along with all other requests."""
        assert not self._calls, "one evaluation of a set at a time"
        plan, rollouts = self.plan, self._run.rollouts.active
        self._calls = [
            (rollout, rollout.evaluate(plan.name, part, len(rollouts), plan.sampling, plan.in_flight))
            for part, rollout in enumerate(rollouts)
        ]
        self._reports = []
        self._state = State(state.step, state.version)
        self._started = time.perf_counter()

    def poll(self, version: int) -> dict[str, float]:
        """Return the metrics of the evaluation that `start` began if it has ended, else {}. version: version that the
        train workers have. Raises as `finish` does."""
        self._take(0.0, version)
        return self._metrics() if self._reports and not self._calls else {}

    def finish(self, version: int) -> dict[str, float]:
        """Wait for the evaluation that `start` began; returns its metrics, or {} when there is none. version: version
        that the train workers have, which actors that replace others then serve.

        The wait lasts for as long as the actors make progress. An actor that dies, or makes no progress for
        resources.stage_timeout_s, is replaced, and its part of the prompts is evaluated again. Raises ActorFailed when
        an actor fails otherwise.
        """
        if not self._calls:
            return {}
        run = self._run
        with run.stages.timed("validate"):
            run.rollouts.begin_watch()
            while self._calls:
                if self._take(LOOK_AFTER_S, version):
                    run.stages.gets_on()
                if run.rollouts.look(version):
                    run.stages.gets_on()
                self._end_stuck(self._calls)
        return self._metrics()

    def evaluate(self, state: State) -> dict[str, float]:
        """Evaluate the policy of `state`, which all engines must serve, and return the metrics. Raises as `finish`
        does."""
        self.start(state)
        return self.finish(state.version)

    def _take(self, timeout_s: float, version: int) -> bool:
        """Take the reports of calls that have ended, waiting up to `timeout_s` for the first of them, and send those of
        actors that died again. Returns whether there were any."""
        run = self._run
        by_call = {call: rollout for rollout, call in self._calls}
        outcomes = ended(list(by_call), "evaluate", timeout_s)
        for call, outcome in outcomes:
            rollout = by_call.pop(call)
            if not isinstance(outcome, ActorFailed):
                self._reports.append(outcome)
                continue
            if not outcome.died:
                raise outcome
            run.rollouts.replace(rollout, call.pid, outcome, version)
            if rollout not in run.rollouts.active:  # its new engine waits for the next sync
                rollout = run.rollouts.active[0]
            by_call[call.again(rollout)] = rollout
        self._calls = [(rollout, call) for call, rollout in by_call.items()]
        return bool(outcomes)

    def _end_stuck(self, calls: Sequence[tuple[RolloutHandle, Call[EvaluationReport]]]) -> None:
        """Kill the actors that have made no progress for resources.stage_timeout_s; their calls then fail like those of
        actors that died."""
        bound_s = self._run.config.resources.stage_timeout_s
        for rollout, call in calls:
            if self._run.rollouts.still_s(rollout) >= bound_s and rollout.info.pid == call.pid:
                _log.warning("stuck: no progress within %g s from %s: it is killed", bound_s, rollout.info)
                rollout.kill()
                self._run.rollouts.begin_watch()  # Ray tells soon that it is gone

    def _metrics(self) -> dict[str, float]:
        """Return the metrics of the evaluation that has ended."""
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
        return {**figures, **self._conditions(reports, failed)}

    def _conditions(self, reports: Sequence[EvaluationReport], failed: int) -> dict[str, float]:
        """Return the metrics that tell how the others came about."""
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
        """Draw conclusions from the figures of an evaluation that has ended. failed: number of failed rows."""
