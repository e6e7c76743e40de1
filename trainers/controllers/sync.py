"""The lock-step controller: roll out, train, sync, and again. Strictly on-policy.

    generate -> claim -> advantages -> plan -> log-probs (prev, ref) -> train -> sync weights -> clear
        ^                                                                              |
        +------------------------------ next version ---------------------------------+

stage       waits for                                unblocked by
generate    all rollout actors                       the last group being put
claim       prompts_per_step whole groups            the commit of the last group (already there)
plan        all workers have their shard             -
log-probs   all workers                              columns written back
train       all workers                              the optimizer step
sync        all engines serve the new version        every bucket verified

Every wait is bounded by resources.stage_timeout_s or dataplane.timeout_s; a dead or failing actor ends it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .. import grpo
from ..figures import step_metrics
from ..grpo import Run, State

AfterStep = Callable[[State, dict[str, float]], None]
"""Called with the state and the step's metrics when a step is done: log, checkpoint, show."""


def run_sync(run: Run, state: State, after_step: AfterStep) -> None:
    """Train from `state` to `algorithm.steps`."""
    every = run.config.validation.every
    if every and state.step == 0:
        after_step(state, {**grpo.validate(run), "policy/version": float(state.version)})
    while state.step < run.config.algorithm.steps:
        start = time.perf_counter()
        run.begin_step(state.step + 1)
        rollouts = grpo.generate(run, state)
        meta = grpo.with_advantages(run, grpo.claim_batch(run))
        grpo.ship_plan(run, meta, state.step + 1)
        passes = grpo.write_logprobs(run) + grpo.train(run)
        state.step, state.version = state.step + 1, state.version + 1
        sync = grpo.sync_weights(run, state)
        grpo.retire(run, meta)
        seconds = time.perf_counter() - start
        metrics = step_metrics(run, state, rollouts, passes, meta, seconds, sync)
        last = state.step == run.config.algorithm.steps
        if every and (state.step % every == 0 or last):
            metrics |= grpo.validate(run)
        after_step(state, metrics)
