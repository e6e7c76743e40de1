"""The async controller: rollouts run up to `algorithm.max_staleness` versions ahead of the training.

    rollouts of step s     started as soon as version s - 1 - max_staleness is served
    rollouts of step s+1   ...                          |
                                                      claim (in the order of steps) -> train -> sync weights in flight

stage       waits for                                unblocked by
rollouts    the version that bounds their staleness  the weight sync before
claim       the step's groups                        the commit of the last one, or a rollout that failed
train       all workers                              the optimizer step
sync        all engines serve the new version        engines pause as sync.in_flight says; rollouts of later steps go on

A step trains on its own prompts, whatever else is ready: no token of its rows is more than max_staleness versions older
than the policy that is trained (`staleness/max`).
"""

from __future__ import annotations

from collections import deque

from .. import grpo
from ..grpo import Rollouts, Run, State
from .step_end import AfterStep, begin_step, end_step, first_validation


def run_ahead(run: Run, state: State, after_step: AfterStep) -> None:
    """Train from `state` to `algorithm.steps`."""
    first_validation(run, state, after_step)
    algorithm = run.config.algorithm
    prompts = algorithm.prompts_per_step
    under_way: deque[Rollouts] = deque()
    while state.step < algorithm.steps:
        tally = begin_step(run, state)
        while len(under_way) <= algorithm.max_staleness and state.step + len(under_way) < algorithm.steps:
            start = state.position + len(under_way) * prompts
            under_way.append(grpo.start_rollouts(run, start, prompts))
        tally.rows.append(grpo.claim_groups(run, prompts, under_way))
        rollouts = under_way.popleft()
        tally.reports += grpo.finish_rollouts(run, rollouts)
        tally.passes += grpo.train_on(run, tally.rows[0], state.step + 1)
        end_step(run, state, tally, under_way, after_step)
