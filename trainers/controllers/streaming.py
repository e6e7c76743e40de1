"""The streaming controller: groups are trained on as they become ready. Strictly on-policy, like sync.

    rollouts of the step ---- group ---- group ------- group ---> put one by one
                                |          |             |
                              claim -> advantages -> plan -> log-probs -> accumulate, chunk by chunk
                                                                             |
                                                              optimizer -> sync weights -> clear

stage       waits for                                unblocked by
claim       the next chunk of whole groups           the commit of its last group, or a rollout that failed
accumulate  all workers                              gradients of the chunk
finish      the last chunk                           the optimizer step
sync        all engines serve the new version        every bucket verified

Training hides under the long tail of generation. The gradient is that of sync for the same rows: losses are sums, and
their N is counted over all chunks.
"""

from __future__ import annotations

from .. import grpo
from ..feed import Feed
from ..grpo import Run, State
from .steps import AfterStep, Steps


def run_streaming(run: Run, state: State, feed: Feed, after_step: AfterStep) -> None:
    """Train from `state` to `algorithm.steps`."""
    algorithm = run.config.algorithm
    steps = Steps(run, state, after_step)
    while steps.go_on:
        tally = steps.begin()
        feed.top_up()
        left = algorithm.prompts_per_step
        while left:
            chunk = min(left, algorithm.chunk_groups or max(run.config.trainer.dp, algorithm.prompts_per_step // 4))
            rows = feed.claim(chunk)
            tally.rows.append(rows)
            tally.passes += grpo.train_on(run, rows, state.step + 1)
            left -= chunk
        feed.give_up_surplus()
        feed.drain()
        steps.end(tally, feed)
