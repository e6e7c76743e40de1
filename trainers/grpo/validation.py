"""Validates the policy on held-out prompts, keeps the best model, and ends the run at its target.

`validation.metric` names the metric that decides. The validation before step 1 only sets the value that later ones must
exceed: the initial model is never exported, and neither is one that equals the best so far.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from ...actors.rollout.report import ValidationReport
from ...actors.rollout.validation_figures import EXACT_MATCH, FigureSums, needs_answers
from ..cluster.calls import ActorFailed, Call, ended
from ..cluster.handles import RolloutHandle
from ..errors import UserError
from . import steps as grpo
from .feed import LOOK_AFTER_S
from .steps import Run, State

_log = logging.getLogger(__name__)
BEST = "best"
"""Name of the best model's folder in the run folder; `best.json` beside it says how good that model is. As long as the
file says step 0, no validation has exceeded the first one, and there is no model folder."""


class Validation:
    """Runs the validations of a run, one at a time. A validation either blocks the run, or runs in the background of
    the next step until its optimizer step."""

    def __init__(self, run: Run) -> None:
        """Read the value of the best model so far from the run folder. There is none before a run's first
        validation."""
        self._run = run
        self._folder = Path(run.config.run.dir or ".")
        self._calls: list[tuple[RolloutHandle, Call[ValidationReport]]] = []
        self._state = State()
        """Step and version of the policy that is validated."""
        self._started = 0.0
        self.reached = False
        """Whether the metric that `validation.metric` names has reached `validation.stop_at`."""
        self._metric = run.config.judged_figure
        self._best = self._best_before()

    def _best_before(self) -> float:
        """Return the best value that an earlier validation of this run has reached. Returns -inf if there is none, or
        if it is a value of another metric than the present `validation.metric`."""
        path = self._folder / f"{BEST}.json"
        best = json.loads(path.read_text()) if path.exists() else {}
        if best.get("metric") == self._metric:
            return best["value"]
        if best:
            former = best.get("metric", EXACT_MATCH)
            _log.warning(
                "%s goes by %s, but validation.metric is now %s: the next better model replaces it",
                path, former, self._metric,
            )  # fmt: skip
        return -math.inf

    def validate(self, state: State) -> dict[str, float]:
        """Validate the policy of `state`, which all engines must serve, and return the metrics. Raises as `finish`
        does."""
        self.start(state)
        return self.finish()

    def start(self, state: State) -> None:
        """Start a validation of the policy of `state` in the background; `finish` waits for it. Engines answer its
        prompts along with all other requests."""
        assert not self._calls, "one validation at a time"
        run, total = self._run, self._run.config.validation.num_prompts
        rollouts = run.rollouts.active
        bounds = [total * index // len(rollouts) for index in range(len(rollouts) + 1)]
        self._calls = [
            (rollout, rollout.validate(first, stop - first, run.validating))
            for rollout, (first, stop) in zip(rollouts, itertools.pairwise(bounds), strict=True)
            if stop > first
        ]
        self._state = State(state.step, state.version)
        self._started = time.perf_counter()

    def finish(self) -> dict[str, float]:
        """Wait for the validation that `start` began; returns its metrics, or {} when there is none. It must be called
        before the train workers change their weights.

        The wait lasts for as long as the actors make progress. An actor that dies, or makes no progress for
        resources.stage_timeout_s, is replaced, and its share of the prompts is validated again. Raises ActorFailed when
        an actor fails otherwise, and UserError when the validation does not yield the metric that `validation.metric`
        names.
        """
        if not self._calls:
            return {}
        run = self._run
        with run.stages.timed("validate"):
            calls, self._calls, reports = self._calls, [], list[ValidationReport]()
            run.rollouts.begin_watch()
            while calls:
                by_call = {call: rollout for rollout, call in calls}
                for call, outcome in ended(list(by_call), "validate", LOOK_AFTER_S):
                    rollout = by_call.pop(call)
                    run.stages.gets_on()
                    if not isinstance(outcome, ActorFailed):
                        reports.append(outcome)
                        continue
                    if not outcome.died:
                        raise outcome
                    run.rollouts.replace(rollout, call.pid, outcome, self._state.version)
                    if rollout not in run.rollouts.active:  # its new engine waits for the next sync
                        rollout = run.rollouts.active[0]
                    by_call[call.again(rollout)] = rollout
                calls = [(rollout, call) for call, rollout in by_call.items()]
                if run.rollouts.look(self._state.version):
                    run.stages.gets_on()
                self._end_stuck(calls)
        sums = FigureSums()
        for report in reports:
            for key, total in report.sums.items():
                sums.add(key, total, report.counts[key])
        rows, failed = (sum(getattr(report, name) for report in reports) for name in ("rows", "failed"))
        if failed:
            error = next(report.first_error for report in reports if report.failed)
            _log.warning("validation: %d of %d rows failed, the first one: %s", failed, rows, error)
        figures = sums.means()
        self._judge(figures, failed)
        return {
            **figures,
            "val/failed_rows": float(failed),
            "val/version": float(self._state.version),
            "time/validate_s": time.perf_counter() - self._started,
        }

    def _end_stuck(self, calls: Sequence[tuple[RolloutHandle, Call[ValidationReport]]]) -> None:
        """Kill the actors that have made no progress for resources.stage_timeout_s; their calls then fail like those of
        actors that died."""
        bound_s = self._run.config.resources.stage_timeout_s
        for rollout, call in calls:
            if self._run.rollouts.still_s(rollout) >= bound_s and rollout.info.pid == call.pid:
                _log.warning("stuck: no progress within %g s from %s: it is killed", bound_s, rollout.info)
                rollout.kill()
                self._run.rollouts.begin_watch()  # Ray tells soon that it is gone

    def _judge(self, figures: dict[str, float], failed: int) -> None:
        config = self._run.config
        value = figures.get(self._metric)
        if value is None and not failed:
            raise UserError(
                f"validation.metric: got {config.validation.metric!r}, which this validation does not have"
                + (", as no validation prompt has an answer" if needs_answers(self._metric) else "")
                + f", expected one of {', '.join(key for key in config.figures if key in figures)}"
            )
        if value is None:
            return  # rewards raised: nothing is known of this policy
        target = config.validation.stop_at
        self.reached = self.reached or (target is not None and value >= target)
        if not config.run.keep_best or value <= self._best:
            return
        self._best = value
        if self._state.step:
            draft = self._folder / f"{BEST}.new"
            shutil.rmtree(draft, ignore_errors=True)
            with grpo.trainer_at_work(self._run, self._state):
                grpo.export_model(self._run, str(draft))
            shutil.rmtree(self._folder / BEST, ignore_errors=True)
            draft.rename(self._folder / BEST)
        best = {"metric": self._metric, "value": value, "step": self._state.step, "version": self._state.version}
        (self._folder / f"{BEST}.json").write_text(json.dumps(best))
