"""The lock-step controller: roll out, train, sync, and again. Strictly on-policy.

    rollouts -> claim -> advantages -> plan -> log-probs (prev, ref) -> train -> sync weights -> clear
        ^                                                                              |
        +------------------------------ next version ---------------------------------+

stage       waits for                                unblocked by
rollout     all rollout actors (oversampled: not)    the last group being put
claim       prompts_per_step whole groups            the commit of the last group (already there)
plan        all workers have their shard             -
log-probs   all workers                              columns written back
train       all workers                              the optimizer step
sync        all engines serve the new version        every bucket verified

Every wait is bounded by resources.stage_timeout_s or dataplane.timeout_s; a dead or failing actor ends it at once.
"""

from __future__ import annotations

from .. import grpo
from ..feed import Feed
from ..grpo import Run, State
from .steps import AfterStep, Steps


def run_sync(run: Run, state: State, feed: Feed, after_step: AfterStep) -> None:
    """Train from `state` to `algorithm.steps`."""
    steps = Steps(run, state, after_step)
    oversampled = run.config.algorithm.dynamic_sampling.oversample > 1
    while steps.go_on:
        tally = steps.begin()
        feed.top_up()
        if not oversampled:
            feed.drain()
        tally.rows.append(feed.claim(run.config.algorithm.prompts_per_step))
        feed.give_up_surplus()
        tally.passes += grpo.train_on(run, tally.rows[0], state.step + 1)
        steps.end(tally, feed)
