"""Runs the training steps of a run, in one loop (a controller) for each `algorithm.mode`.

A wait for rollouts or a validation lasts for as long as actors make progress. Other waits are bounded by
resources.stage_timeout_s, sync.timeout_s or dataplane.timeout_s. An actor that fails ends a wait at once, unless it can
be replaced.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config.config import Config
from . import steps as grpo
from .feed import Feed
from .loop import AfterStep, Steps
from .steps import Run, State


def run_sync(run: Run, state: State, feed: Feed, after_step: AfterStep) -> None:
    """Train from `state` to step `algorithm.steps`, one stage after the other: roll out, train, sync weights, repeat.
    Strictly on-policy.

    rollouts -> claim -> advantages -> plan -> reference log-probs -> train -> sync weights -> clear
        ^                                                                           |
        +------------------------------ next version -------------------------------+

    stage       waits for                                unblocked by
    rollout     all rollout actors, unless oversampled   the last group being put
    claim       prompts_per_step complete groups         the last group being put (done by then)
    plan        all train workers have their shard       -
    log-probs   all train workers                        the columns being written back
    train       all train workers                        the optimizer step
    sync        all engines serve the new version        every bucket being verified

    With `resources.switch_roles`, the engines sleep from the claim to the sync, and the train workers are offloaded at
    all other times (see roles.py).
    """
    steps = Steps(run, state, after_step)
    oversampled = run.config.algorithm.dynamic_sampling.oversample > 1
    while steps.go_on:
        tally = steps.begin()
        feed.top_up()
        if not oversampled:
            feed.drain()
        tally.rows.append(feed.claim(run.config.algorithm.prompts_per_step))
        feed.give_up_surplus()
        run.roles.to_training()
        tally.passes += grpo.train_on(run, tally.rows[0], state.step + 1)
        steps.end(tally, feed)


def run_streaming(run: Run, state: State, feed: Feed, after_step: AfterStep) -> None:
    """Train from `state` to step `algorithm.steps` on groups as they become ready. Strictly on-policy, like `sync`.

    rollouts of the step ---- group ---- group ------- group ---> put one by one
                                |          |             |
                              claim -> advantages -> plan -> log-probs -> accumulate, chunk by chunk
                                                                             |
                                                              optimizer -> sync weights -> clear

    stage       waits for                                unblocked by
    claim       the next chunk of complete groups        its last group being put, or a rollout that failed
    accumulate  all train workers                        the gradients of the chunk
    finish      the last chunk                           the optimizer step
    sync        all engines serve the new version        every bucket being verified

    Training overlaps with the generation of the step's longest responses. For the same rows the gradient equals that of
    `sync`, because losses are sums that are divided once, by a count over all chunks.
    """
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


def run_async(run: Run, state: State, feed: Feed, after_step: AfterStep) -> None:
    """Train from `state` to step `algorithm.steps` while rollouts run up to `algorithm.max_staleness` versions ahead.

    rollouts of step s     issued as soon as version s - 1 - max_staleness is served
    rollouts of step s+1   ...                          |
                                                      claim -> train -> sync weights in flight

    stage       waits for                                unblocked by
    claim       a step's groups, in the sampler's order  the last group being put, or a rollout that failed
    train       all train workers                        the optimizer step
    sync        all engines serve the new version        the engines' pause (sync.in_flight); later rollouts go on

    No token of a step's rows is more than max_staleness versions older than the policy that is trained on it
    (`staleness/max`). When groups are trained on in the order of their prompts, this holds because prompts are not
    issued too early. Other samplers let groups overtake each other: a group that grows too old is then cleared, and
    `algorithm.stale_groups` says whether the same prompt or another one is rolled out in its place.
    """
    steps = Steps(run, state, after_step)
    while steps.go_on:
        tally = steps.begin()
        feed.top_up()
        tally.rows.append(feed.claim(run.config.algorithm.prompts_per_step))
        tally.passes += grpo.train_on(run, tally.rows[0], state.step + 1)
        if run.config.run.deterministic:
            feed.drain()  # so that no row has tokens of two versions, and timing decides nothing
        steps.end(tally, feed)


def controller(config: Config) -> Callable[[Run, State, Feed, AfterStep], None]:
    """Return the training loop of `algorithm.mode`. Raises ValueError for an unknown mode."""
    if config.algorithm.mode == "sync":
        return run_sync
    if config.algorithm.mode == "async":
        return run_async
    if config.algorithm.mode == "streaming":
        return run_streaming
    raise ValueError(f"algorithm.mode: got {config.algorithm.mode!r}, expected 'sync', 'async' or 'streaming'")
