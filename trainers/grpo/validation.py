"""Validates the policy on held-out prompts, keeps the best model, and ends the run at its target.

`validation.metric` names the metric that decides. The validation before step 1 only sets the value that later ones must
exceed: the initial model is never exported, and neither is one that equals the best so far.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from ...actors.rollout.evaluation_figures import EXACT_MATCH, needs_answers
from ...actors.rollout.report import EvaluationReport
from ..cluster.evaluation_plans import EvaluationPlan
from ..errors import UserError
from . import steps as grpo
from .evaluation import Evaluation
from .steps import Run

_log = logging.getLogger(__name__)
BEST = "best"
"""Name of the best model's folder in the run folder; `best.json` beside it says how good that model is. As long as the
file says step 0, no validation has exceeded the first one, and there is no model folder."""


class Validation(Evaluation):
    """Makes the validations of a run, one at a time. A validation either blocks the run, or runs in the background of
    the next step until its optimizer step."""

    def __init__(self, run: Run, plan: EvaluationPlan) -> None:
        """Read the value of the best model so far from the run folder. There is none before a run's first
        validation."""
        super().__init__(run, plan)
        self._folder = Path(run.config.run.dir or ".")
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

    def _conditions(self, reports: Sequence[EvaluationReport], failed: int) -> dict[str, float]:
        return {
            "val/failed_rows": float(failed),
            "val/version": float(self._state.version),
            "time/validate_s": time.perf_counter() - self._started,
        }

    def _judge(self, figures: dict[str, float], failed: int) -> None:
        """Keep the model if it is the best so far, and see whether the target is reached. Raises UserError when the
        validation does not yield the metric that `validation.metric` names."""
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
