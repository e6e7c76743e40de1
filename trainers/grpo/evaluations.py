"""Starts the evaluations of a run when they are due, and collects their metrics: validation and all named sets."""

from __future__ import annotations

import logging

from ..cluster.evaluation_plans import VALIDATION
from .evaluation import Evaluation
from .steps import Run, State
from .validation import Validation

_log = logging.getLogger(__name__)


class Evaluations:
    """All evaluations of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._all = [
            Validation(run, plan) if plan.name == VALIDATION else Evaluation(run, plan) for plan in run.evaluations
        ]

    @property
    def reached(self) -> bool:
        """Whether validation has reached the target that ends the run."""
        return any(isinstance(evaluation, Validation) and evaluation.reached for evaluation in self._all)

    def before_first_step(self, state: State) -> dict[str, float]:
        """Evaluate the initial policy; returns the metrics of the evaluations that the run waits for. Background
        evaluations of named sets go on during the first steps."""
        metrics: dict[str, float] = {}
        if not self._all or self._run.engines.ahead_of(state.version):
            return metrics
        for evaluation in self._all:
            evaluation.start(state)
            if evaluation.plan.awaited != "never":
                metrics |= evaluation.finish(state.version)
        return metrics

    def before_update(self, state: State) -> dict[str, float]:
        """Wait for the evaluations that may not outlast the version that they are about; returns their metrics. Must be
        called before the train workers change their weights."""
        metrics: dict[str, float] = {}
        for evaluation in self._all:
            if evaluation.plan.awaited == "before_update":
                metrics |= evaluation.finish(state.version)
        return metrics

    def after_step(self, state: State, *, last: bool) -> dict[str, float]:
        """Start the evaluations of the policy of `state` that are due; returns the metrics of those that have ended
        since the last step. In the last step all are due, and the run waits for them."""
        metrics: dict[str, float] = {}
        served = not self._run.engines.ahead_of(state.version)  # else it was evaluated before the workers went back
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
                    _log.warning("%s: that of an earlier step ended with the last one: %s", plan.name, earlier)
                metrics |= evaluation.finish(state.version)
        if self.reached:  # no step follows
            for evaluation in self._all:
                metrics |= evaluation.finish(state.version)
        return metrics
