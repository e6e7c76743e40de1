"""Validation of the policy: greedy answers to held-out prompts, the best model kept, the run ended at its target."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from pathlib import Path

from ...actors.rollout.report import ValidationReport
from ..cluster.handles import Call, PeerFailed, gather_each
from . import steps as grpo
from .steps import Run, State

BEST = "best"
"""Folder of the best model in the run's, and (with .json) of its figures."""


class Validation:
    """Of one run. In the foreground, or beside a step up to its optimizer; one at a time."""

    def __init__(self, run: Run) -> None:
        """A resumed run has still the best model of the one before."""
        self._run = run
        self._folder = Path(run.config.run.dir or ".")
        self._calls: list[Call] = []
        self._of = State()
        self._started = 0.0
        self.reached = False
        """Whether exact match has reached validation.stop_at."""
        best = self._folder / f"{BEST}.json"
        self._best = json.loads(best.read_text())["exact_match"] if best.exists() else -1.0

    def validate(self, state: State) -> dict[str, float]:
        """Figures of `state`'s policy, which all engines serve; no rows are put. Raises PeerFailed."""
        self.start(state)
        return self.finish()

    def start(self, state: State) -> None:
        """Have the engines answer, beside what else they do, until `finish`."""
        assert not self._calls, "one validation at a time"
        run, total = self._run, self._run.config.validation.num_prompts
        rollouts = run.active_rollouts
        bounds = [total * hand // len(rollouts) for hand in range(len(rollouts) + 1)]
        self._calls = [
            peer.call("validate", first, stop - first, run.greedy)
            for peer, (first, stop) in zip(rollouts, itertools.pairwise(bounds), strict=True)
            if stop > first
        ]
        self._of = State(state.step, state.version)
        self._started = time.perf_counter()

    def finish(self) -> dict[str, float]:
        """Wait for what `start` began, before the train workers change their weights; nothing when it did not.

        An actor that dies is replaced, and its part asked for again. Raises PeerFailed.
        """
        if not self._calls:
            return {}
        run = self._run
        with run.stage("validate"):
            calls, self._calls, reports = self._calls, [], list[ValidationReport]()
            while calls:
                outcomes = gather_each(calls, "validate", run.config.resources.stage_timeout_s)
                lost = []
                for call, outcome in zip(calls, outcomes, strict=True):
                    if not isinstance(outcome, PeerFailed):
                        reports.append(outcome)
                        continue
                    if not outcome.died:
                        raise outcome
                    grpo.replace_actor(run, call.peer, call.pid, outcome, self._of.version)
                    lost.append(call.peer.call(call.method, *call.args))
                calls = lost
        rows = sum(report.rows for report in reports)
        exact = sum(report.exact_match * report.rows for report in reports) / rows
        self._judge(exact)
        return {
            "val/exact_match": exact,
            "val/reward": sum(report.reward * report.rows for report in reports) / rows,
            "val/version": float(self._of.version),
            "time/validate_s": time.perf_counter() - self._started,
        }

    def _judge(self, exact: float) -> None:
        config = self._run.config
        target = config.validation.stop_at
        self.reached = self.reached or (target is not None and exact >= target)
        if config.run.keep_best and exact > self._best:
            self._best = exact
            draft = self._folder / f"{BEST}.new"
            shutil.rmtree(draft, ignore_errors=True)
            grpo.export_model(self._run, str(draft))
            shutil.rmtree(self._folder / BEST, ignore_errors=True)
            draft.rename(self._folder / BEST)
            figures = {"exact_match": exact, "step": self._of.step, "version": self._of.version}
            (self._folder / f"{BEST}.json").write_text(json.dumps(figures))
