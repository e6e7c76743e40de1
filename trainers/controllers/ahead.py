"""The async controller: rollouts run up to `algorithm.max_staleness` versions ahead of the training.

    rollouts of step s     issued as soon as version s - 1 - max_staleness is served
    rollouts of step s+1   ...                          |
                                                      claim -> train -> sync weights in flight

stage       waits for                                unblocked by
claim       a step's groups, by the sampler          the commit of the last one, or a rollout that failed
train       all workers                              the optimizer step
sync        all engines serve the new version        engines pause as sync.in_flight says; rollouts of later steps go on

No token of a step's rows is more than max_staleness versions older than the policy that is trained (`staleness/max`).
In the prompts' order groups are admitted so that this holds; with a sampler that lets some overtake others, those that
grow too old are cleared, and rolled out again or dropped (`algorithm.stale_groups`).
"""

from __future__ import annotations

from .. import grpo
from ..feed import Feed
from ..grpo import Run, State
from .steps import AfterStep, Steps


def run_ahead(run: Run, state: State, feed: Feed, after_step: AfterStep) -> None:
    """Train from `state` to `algorithm.steps`."""
    steps = Steps(run, state, after_step)
    while steps.go_on:
        tally = steps.begin()
        feed.top_up()
        tally.rows.append(feed.claim(run.config.algorithm.prompts_per_step))
        tally.passes += grpo.train_on(run, tally.rows[0], state.step + 1)
        if run.config.run.deterministic:
            feed.drain()  # so that no row has tokens of two versions, and timing decides nothing
        steps.end(tally, feed)
