"""The lock-step controller: roll out, train, sync, and again. Strictly on-policy.

    rollouts -> claim -> advantages -> plan -> log-probs (prev, ref) -> train -> sync weights -> clear
        ^                                                                              |
        +------------------------------ next version ---------------------------------+

stage       waits for                                unblocked by
rollout     all rollout actors                       the last group being put
claim       prompts_per_step whole groups            the commit of the last group (already there)
plan        all workers have their shard             -
log-probs   all workers                              columns written back
train       all workers                              the optimizer step
sync        all engines serve the new version        every bucket verified

Every wait is bounded by resources.stage_timeout_s or dataplane.timeout_s; a dead or failing actor ends it at once.
"""

from __future__ import annotations

from .. import grpo
from ..grpo import Run, State
from .step_end import AfterStep, begin_step, end_step, first_validation


def run_sync(run: Run, state: State, after_step: AfterStep) -> None:
    """Train from `state` to `algorithm.steps`."""
    first_validation(run, state, after_step)
    prompts = run.config.algorithm.prompts_per_step
    while state.step < run.config.algorithm.steps:
        tally = begin_step(run, state)
        tally.reports += grpo.finish_rollouts(run, grpo.start_rollouts(run, state.position, prompts))
        tally.rows.append(grpo.claim_groups(run, prompts, ()))
        tally.passes += grpo.train_on(run, tally.rows[0], state.step + 1)
        end_step(run, state, tally, (), after_step)
