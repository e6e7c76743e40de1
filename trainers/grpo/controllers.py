"""Runs the training steps of a run, in one loop for every `algorithm.mode`.

rollouts, up to `window` versions ahead ---- group ---- group ------- group ---> put one by one
                                               |          |             |
                                             claim -> advantages -> plan -> log-probs -> train -> free, by chunk
                                                                                            |
                                                      optimizer -> sync weights in flight -> clear

stage       waits for                                unblocked by
claim       the next chunk of complete groups        its last group being put, or a rollout that failed
train       all train workers                        the gradients of the chunk
finish      the last chunk                           the optimizer update
sync        all engines serve the new version        every bucket being verified, the engines' pause

What a mode does is in the numbers of `Overlap`. With a window of 0, training is strictly on-policy: after the last
claim of a step nothing is in flight. With a larger window no token of a step's rows is more than `window` versions
older than the policy that is trained on it (`staleness/max`). When groups are trained on in the order of their prompts,
this holds because prompts are not issued too early. Other samplers let groups overtake each other: a group that grows
too old is then cleared, and `algorithm.stale_groups` says whether the same prompt or another one is rolled out in its
place. With chunks smaller than a step, training overlaps with the generation of the step's longest responses. For the
same rows the gradient does not depend on the chunks, because losses are sums that are divided once per update. The
bytes of a chunk go back to the data plane once its gradients are there, while its rows are cleared with the step: a
store that holds less than a step then suffices.

With `resources.switch_roles`, a step that is trained on as a whole with a window of 0 has the engines sleep from the
claim to the sync, and the train workers offloaded at all other times (see roles.py). In a run that borrows its GPUs
from a pool, the train workers have theirs from the last claim to the sync (see pool/tenant/).

A wait for rollouts or a validation lasts for as long as actors make progress. Other waits are bounded by
resources.stage_timeout_s, sync.timeout_s or dataplane.timeout_s. An actor that fails ends a wait at once, unless it can
be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...dataplane.meta import KVBatchMeta
from . import steps as grpo
from .feed import Feed
from .loop import AfterStep, Steps, StepTally
from .steps import Run, State
from .updates import finish_update, train_on_step


def run_steps(run: Run, state: State, feed: Feed, after_step: AfterStep) -> None:
    """Train from `state` to step `algorithm.steps`; updates `state`."""
    overlap = run.config.overlap
    steps = Steps(run, state, after_step)
    while steps.go_on:
        tally = steps.begin()
        feed.top_up()
        if overlap.by_chunk:
            _train_by_chunk(run, state, feed, tally)
        else:
            rows = feed.claim(overlap.groups)
            _end_rollouts(run, feed)
            if run.roles.lends:
                _borrow_gpus(run, feed)
            run.roles.to_training()
            tally.rows.append(rows)
            tally.passes += train_on_step(run, state, rows)
        if run.config.run.deterministic:
            feed.drain()  # so that no row has tokens of two versions, and timing decides nothing
        steps.end(tally, feed)


def _train_by_chunk(run: Run, state: State, feed: Feed, tally: StepTally) -> None:
    """Train on the groups of the next step as they become ready, in as many updates as it has mini-batches. Each update
    takes the groups that are ready first. Train workers with borrowed GPUs begin when all groups are ready, because
    they cannot give their GPUs back in the midst of a step."""
    last_update = run.config.algorithm.minibatches - 1
    chunks = _chunks(run, feed)
    if run.roles.lends:
        chunks = iter(list(chunks))
        _borrow_gpus(run, feed)
    for update, left, rows in chunks:
        last = not left and update == last_update
        tally.rows.append(rows)
        if last:
            _end_rollouts(run, feed)
        tally.passes += grpo.train_on(run, rows, state.step + 1)
        if not last:
            grpo.give_back(run, rows)  # the last chunk's is cleared with the step
        if not left and not last:
            tally.passes += finish_update(run, state)


def _chunks(run: Run, feed: Feed) -> Iterator[tuple[int, int, KVBatchMeta]]:
    """Claim the chunks of a step one after the other. Yields the number of the update, the number of groups that the
    update still lacks after the chunk, and the receipt for the chunk's rows."""
    overlap, minibatches = run.config.overlap, run.config.algorithm.minibatches
    for update in range(minibatches):
        left = overlap.groups // minibatches
        while left:
            least = min(overlap.chunk, left)
            # Any number of groups would do, but how many are ready when is a matter of timing.
            rows = feed.claim(least if run.config.run.deterministic else left, least)
            left -= len(rows) // run.config.rows_per_group
            yield update, left, rows


def _borrow_gpus(run: Run, feed: Feed) -> None:
    """Have the pool grant the train workers their GPUs, once nothing more of this step is waited for with them."""
    if run.config.run.deterministic:
        feed.drain()
    run.roles.to_training()


def _end_rollouts(run: Run, feed: Feed) -> None:
    """With a window of 0, end what is still in flight after the last claim of a step: rollouts of surplus groups, and
    calls whose groups have all come."""
    if not run.config.overlap.window:
        feed.give_up_surplus()
        feed.drain()
