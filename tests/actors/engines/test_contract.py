"""The contract suite of generation engines: `hf`, `scripted` and `vllm` must all pass the same tests.

`scripted` has no model: it takes weights of any names and shapes, and its tokens do not change with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines.protocol import EngineBroken, SamplingParams
from headrace.actors.weight_sync.transports.protocol import WeightTransferError
from headrace.tests.actors.engines.engine_subjects import (
    BOUND_S,
    GREEDY,
    LONG,
    PROMPT,
    Subject,
    expect_sound,
    opened,
    tokens,
)
from headrace.tests.actors.weight_sync.weight_updates import Publisher


@pytest.fixture(scope="module", params=["hf", "scripted", pytest.param("vllm", marks=pytest.mark.vllm)])
def subject(
    request: pytest.FixtureRequest, model_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    with opened(request.param, model_folder, tmp_path_factory.mktemp(f"contract-{request.param}")) as made:
        yield made


# ---------------------------------------------------------------- requests


def test_n_completions_in_order_the_same_for_the_same_request(subject: Subject) -> None:
    async def main() -> None:
        params = SamplingParams(n=5, max_new_tokens=20, seed=3)
        first = await subject.start("same", params)
        expect_sound(first, params, {subject.engine.version})
        assert {one.finish_reason for one in first} <= {"stop", "length"}
        assert len({tuple(row) for row in tokens(first)}) > 1, "samples share their random numbers"
        assert tokens(await subject.start("same", params)) == tokens(first)

    subject.run(main)


@pytest.mark.long
def test_concurrent_requests_get_their_own_answers(subject: Subject) -> None:
    async def main() -> None:
        params = [SamplingParams(n=1 + i % 3, max_new_tokens=4 + i, seed=i) for i in range(8)]
        together = await asyncio.gather(*(subject.start(f"r{i}", p) for i, p in enumerate(params)))
        before = subject.engine.stats.rows
        for i, p in enumerate(params):
            expect_sound(together[i], p, {subject.engine.version})
            assert tokens(await subject.start(f"r{i}", p)) == tokens(together[i])
        assert subject.engine.stats.rows - before == sum(p.n for p in params)

    subject.run(main)


def test_an_id_is_unique_while_in_flight(subject: Subject) -> None:
    async def main() -> None:
        (running,) = await subject.begun("twice")
        with pytest.raises(ValueError, match="'twice' is already in flight"):
            await subject.engine.generate("twice", PROMPT, GREEDY)
        await running
        await subject.start("twice", GREEDY)
        with pytest.raises(ValueError, match="the prompt has no tokens"):
            await subject.engine.generate("empty", [], GREEDY)

    subject.run(main)


def test_stop_tokens_and_stop_texts_end_a_completion_and_stay(subject: Subject, tokenizer: Any) -> None:
    async def main() -> None:
        for index in range(6):
            params = SamplingParams(n=8, max_new_tokens=30, seed=index, stop_token_ids=(10, 11, 12))
            for one in await subject.start(f"ids{index}", params):
                row = one.token_ids.tolist()
                assert not {10, 11, 12} & set(row[:-1])
                assert (one.finish_reason == "stop") == (row[-1] in (2, 10, 11, 12))
        ends = set()
        plain = await subject.start("texts", SamplingParams(n=8, max_new_tokens=30, seed=4))
        texts = (
            tokenizer.decode(one.token_ids[2:4], skip_special_tokens=True) for one in plain if len(one.token_ids) > 4
        )
        stops = tuple(text for text in texts if text)
        for one in await subject.start("texts", SamplingParams(n=8, max_new_tokens=30, seed=4, stop=stops)):
            text = tokenizer.decode(one.token_ids, skip_special_tokens=True)
            before = tokenizer.decode(one.token_ids[:-1], skip_special_tokens=True)
            assert not any(stop in before for stop in stops)
            assert (one.finish_reason == "stop") == (one.token_ids[-1] == 2 or any(stop in text for stop in stops))
            ends.add(one.finish_reason)
        assert "stop" in ends
        for one in await subject.start("special", SamplingParams(n=32, max_new_tokens=30, stop=("<bos>",))):
            row = one.token_ids.tolist()
            assert 1 not in row[:-1] and (one.finish_reason == "stop") == (row[-1] in (1, 2)), "not in any text"
        with pytest.raises(ValueError, match="stop: got '<bos>=', expected the special token '<bos>' alone"):
            await subject.start("both", SamplingParams(stop=("<bos>=",)))
        if subject.kind != "scripted":
            with pytest.raises(ValueError, match="stop token id 99999, expected 0"):
                await subject.start("unknown", SamplingParams(stop_token_ids=(99999,)))

    subject.run(main)


def test_abort_returns_what_there_is(subject: Subject) -> None:
    async def main() -> None:
        ended, other = await subject.begun("ended", "other")
        await asyncio.sleep(0.02)
        await subject.engine.abort("ended")
        partial = await ended
        expect_sound(partial, LONG, {subject.engine.version})
        assert "abort" in {one.finish_reason for one in partial}
        assert all(len(one.token_ids) < 56 for one in partial if one.finish_reason == "abort")
        await subject.engine.abort("unknown")
        assert "abort" not in {one.finish_reason for one in await other}

    subject.run(main)


def test_cancelling_a_call_frees_its_id_and_harms_no_other(subject: Subject) -> None:
    async def main() -> None:
        cancelled, other = await subject.begun("cancelled", "other")
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        expect_sound(await subject.start("cancelled", GREEDY), GREEDY, {subject.engine.version})
        assert "abort" not in {one.finish_reason for one in await other}

    subject.run(main)


# ---------------------------------------------------------------- pausing


@pytest.mark.long
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_and_resume_with_requests_in_flight(subject: Subject, mode: Any) -> None:
    async def main() -> None:
        expected = None
        if mode != "abort":
            expected = tokens(await subject.start("paused"))
        (running,) = await subject.begun("paused")
        await subject.engine.pause(mode)
        late = subject.start("late", GREEDY)
        if mode == "keep":
            made = subject.engine.stats.tokens
            await asyncio.sleep(0.2)  # longer than the request takes: nothing may come of it
            assert not running.done() and subject.engine.stats.tokens == made
        else:
            completions = await running
            assert ("abort" in {one.finish_reason for one in completions}) == (mode == "abort")
            await asyncio.sleep(0.05)
        assert not late.done()
        await subject.engine.pause("wait")  # paused already: returns, and nothing continues
        assert not late.done() and running.done() == (mode != "keep")
        await subject.engine.resume()
        await subject.engine.resume()
        expect_sound(await late, GREEDY, {subject.engine.version})
        if expected is not None:
            assert tokens(await running) == expected

    subject.run(main)


def test_requests_that_are_held_or_frozen_can_be_aborted_and_cancelled(subject: Subject) -> None:
    async def main() -> None:
        (frozen, gone) = await subject.begun("frozen", "gone")
        await subject.engine.pause("keep")
        held = subject.start("held", SamplingParams(n=3, max_new_tokens=9))
        waiting = subject.start("waiting", GREEDY)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await subject.engine.abort("held")
        assert tokens(await held) == [[], [], []] and (await held)[0].finish_reason == "abort"
        await subject.engine.abort("frozen")
        expect_sound(await frozen, LONG, {subject.engine.version})
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        await subject.engine.resume()
        await subject.start("gone", GREEDY)
        await subject.start("waiting", GREEDY)

    subject.run(main)


# ---------------------------------------------------------------- weights


def test_a_prepared_version_is_served_from_its_commit_on(subject: Subject) -> None:
    async def main() -> None:
        engine, old = subject.engine, subject.engine.version
        before = await subject.start("g", GREEDY)
        (running,) = await subject.begun("running")
        await engine.prepare_weights(subject.update())
        assert engine.version == old
        expect_sound(await running, LONG, {old})
        assert tokens(await subject.start("g", GREEDY)) == tokens(before)
        report = await engine.commit_weights(old + 1)
        assert (report.version, report.kept, report.aborted) == (old + 1, 0, 0)
        assert 0 <= report.pause_s < BOUND_S and 0 <= report.load_s < BOUND_S and engine.version == old + 1
        after = await subject.start("g", GREEDY)
        expect_sound(after, GREEDY, {old + 1})
        if subject.kind == "scripted":
            torch.testing.assert_close(engine.loaded["w"], subject.weights["w"] * (1 + (old + 1) / 20))
        else:
            assert np.abs(after[0].logprobs[:1] - before[0].logprobs[:1]).max() > 1e-4, "the weights are the old ones"

    subject.run(main)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_commit_with_requests_in_flight(subject: Subject, mode: Any) -> None:
    async def main() -> None:
        engine, old = subject.engine, subject.engine.version
        await engine.prepare_weights(subject.update())
        running = await subject.begun("a", "b")
        report = await engine.commit_weights(old + 1, mode)
        late = await subject.start("late", GREEDY)
        expect_sound(late, GREEDY, {old + 1})
        answers = await asyncio.gather(*running)
        for completions in answers:
            expect_sound(completions, LONG, {old, old + 1} if mode == "keep" else {old})
            ended = {one.finish_reason for one in completions}
            assert ("abort" in ended) == (mode == "abort")
        assert (report.kept, report.aborted) == {"keep": (2, 0), "wait": (0, 0), "abort": (0, 2)}[mode]
        if mode == "keep":
            assert all(any(one.versions[-1] == old + 1 for one in completions) for completions in answers)

    subject.run(main)


def test_versions_change_in_the_middle_of_a_completion(subject: Subject) -> None:
    async def main() -> None:
        for attempt in range(30):
            old = subject.engine.version
            await subject.engine.prepare_weights(subject.update())
            (running,) = await subject.begun(f"mid{attempt}")
            await asyncio.sleep(0.004 * attempt)
            await subject.engine.commit_weights(old + 1, "keep")
            completions = await running
            expect_sound(completions, LONG, {old, old + 1})
            if any(len(set(one.versions.tolist())) == 2 for one in completions):
                return
        pytest.fail("no completion of 30 saw two versions")

    subject.run(main)


def test_a_paused_engine_stays_paused_over_a_commit(subject: Subject) -> None:
    async def main() -> None:
        engine, old = subject.engine, subject.engine.version
        await engine.prepare_weights(subject.update())
        (running,) = await subject.begun("a")
        await engine.pause("keep")
        report = await engine.commit_weights(old + 1, "keep")
        late = subject.start("late", GREEDY)
        await asyncio.sleep(0.05)
        assert report.kept == 1 and not running.done() and not late.done()
        await engine.resume()
        expect_sound(await late, GREEDY, {old + 1})
        expect_sound(await running, LONG, {old, old + 1})

    subject.run(main)


def test_a_version_that_is_not_prepared_or_does_not_rise_is_refused(subject: Subject) -> None:
    async def main() -> None:
        engine, old = subject.engine, subject.engine.version
        with pytest.raises(ValueError, match=str(old + 1)):
            await engine.commit_weights(old + 1)
        update = subject.update()
        await engine.prepare_weights(update)
        with pytest.raises(ValueError, match=str(old + 2)):
            await engine.commit_weights(old + 2)
        await engine.commit_weights(old + 1)
        later = subject.update()
        await engine.prepare_weights(later)
        await engine.commit_weights(old + 2)
        with pytest.raises(ValueError, match=f"version {old + 1}.*{old + 2}"):
            await engine.prepare_weights(update)
        with pytest.raises(ValueError):
            await engine.commit_weights(old + 1)
        assert engine.version == old + 2

    subject.run(main)


def test_preparing_and_committing_the_version_that_is_served_does_nothing(subject: Subject) -> None:
    async def main() -> None:
        engine, old = subject.engine, subject.engine.version
        update = subject.update()
        assert await engine.prepare_weights(update) == "staged"
        (running,) = await subject.begun("running")
        first, second = await asyncio.gather(engine.commit_weights(old + 1), engine.commit_weights(old + 1))
        assert first.version == second.version == engine.version == old + 1
        expect_sound(await running, LONG, {old})
        before = engine.progress
        for _ in range(2):
            assert await engine.prepare_weights(update) == "staged"
            assert (await engine.commit_weights(old + 1)).load_s == 0.0
        assert engine.progress == before, "nothing was received"
        expect_sound(await subject.start("g", GREEDY), GREEDY, {old + 1})
        assert engine.progress > before

    subject.run(main)


def test_progress_is_seen_while_a_request_runs(subject: Subject) -> None:
    async def main() -> None:
        (running,) = await subject.begun("running")
        before = subject.engine.progress
        while subject.engine.progress == before:
            assert not running.done(), "no token was counted before the request's end"
            await asyncio.sleep(0.001)
        await running

    subject.run(main)


def test_wrong_weights_are_named_and_leave_the_old_version(subject: Subject) -> None:
    if subject.kind == "scripted":
        pytest.skip("scripted has no model: it takes any names and shapes")

    async def main() -> None:
        engine, old = subject.engine, subject.engine.version
        before = await subject.start("g", GREEDY)
        good, norm = subject.weights, "model.norm.weight"
        cases = [
            ({n: t for n, t in good.items() if n != norm}, norm),
            ({**good, "model.norm.wieght": good[norm]}, "model.norm.wieght"),
            ({**good, norm: good[norm][:-1].clone()}, norm),
        ]
        for step, (named, message) in enumerate(cases, start=1):
            with pytest.raises(ValueError, match=message):
                await engine.prepare_weights(subject.publisher.publish(old + step, named))
            with pytest.raises(ValueError):
                await engine.commit_weights(old + step)
        assert tokens(await subject.start("g", GREEDY)) == tokens(before) and engine.version == old
        await engine.prepare_weights(subject.publisher.publish(old + 9, subject.weights))
        await engine.commit_weights(old + 9)

    subject.run(main)


def test_an_update_that_is_gone_leaves_the_old_version(subject: Subject, tmp_path: Path) -> None:
    async def main() -> None:
        engine, old = subject.engine, subject.engine.version
        publisher = Publisher(tmp_path, engine.num_workers, timeout_s=1.0)
        update = publisher.publish(old + 1, subject.weights)
        publisher.close()
        with pytest.raises(WeightTransferError, match=str(old + 1)):
            await engine.prepare_weights(update)
        with pytest.raises(ValueError):
            await engine.commit_weights(old + 1)
        expect_sound(await subject.start("g", GREEDY), GREEDY, {old})

    subject.run(main)


@pytest.mark.parametrize("way", ["drop", "cancel"])
def test_a_reception_can_be_ended(subject: Subject, tmp_path: Path, way: str) -> None:
    async def main() -> None:
        engine, old = subject.engine, subject.engine.version
        publisher = Publisher(tmp_path, engine.num_workers, timeout_s=60.0)
        arriving = asyncio.create_task(engine.prepare_weights(publisher.announce(old + 1, subject.weights)))
        await asyncio.sleep(0.2)  # it waits for a first bucket that never comes
        started = time.monotonic()
        if way == "drop":
            await engine.drop_weights(old + 1)
        else:
            arriving.cancel()
        with pytest.raises(asyncio.CancelledError if way == "cancel" else WeightTransferError):
            await arriving
        assert time.monotonic() - started < 20, "the wait went on to its bound"
        publisher.close()
        with pytest.raises(ValueError):
            await engine.commit_weights(old + 1)
        await engine.prepare_weights(subject.update())
        await engine.commit_weights(old + 1)
        expect_sound(await subject.start("g", GREEDY), GREEDY, {old + 1})

    subject.run(main)


def test_a_dropped_version_is_forgotten_and_can_come_again(subject: Subject) -> None:
    async def main() -> None:
        engine, old = subject.engine, subject.engine.version
        update = subject.update()
        await engine.prepare_weights(update)
        await engine.drop_weights(old + 1)
        await engine.drop_weights(old + 1)
        await engine.drop_weights(old + 7)
        with pytest.raises(ValueError):
            await engine.commit_weights(old + 1)
        await engine.prepare_weights(update)
        await engine.drop_weights(old)  # another version's drop does not touch it
        await engine.commit_weights(old + 1)
        expect_sound(await subject.start("g", GREEDY), GREEDY, {old + 1})

    subject.run(main)


# ---------------------------------------------------------------- sleep and the end


def test_sleep_and_wake(subject: Subject) -> None:
    async def main() -> None:
        engine = subject.engine
        before = await subject.start("g", GREEDY)
        await engine.sleep()
        await engine.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            await engine.generate("g", PROMPT, GREEDY)
        await engine.wake()
        await engine.wake()
        assert tokens(await subject.start("g", GREEDY)) == tokens(before)
        with pytest.raises(ValueError, match="sleep level: got 3"):
            await engine.sleep(3)

    subject.run(main)


def test_dropped_weights_ask_for_a_commit_which_a_sleeping_engine_takes(subject: Subject) -> None:
    async def main() -> None:
        engine, version = subject.engine, subject.engine.version + 1
        await engine.prepare_weights(subject.update())
        await engine.commit_weights(version)
        await engine.sleep(2)
        await engine.wake()
        with pytest.raises(EngineBroken, match="commit a version"):
            await subject.start("g", GREEDY)
        await engine.prepare_weights(subject.publisher.publish(version, subject.weights))
        await engine.commit_weights(version)
        expect_sound(await subject.start("g", GREEDY), GREEDY, {version})
        await engine.sleep(2)
        assert subject.kind != "scripted" or not engine.loaded
        await engine.prepare_weights(subject.update())
        await engine.commit_weights(version + 1)
        with pytest.raises(RuntimeError, match="asleep"):
            await subject.start("g", GREEDY)
        await engine.wake()
        expect_sound(await subject.start("g", GREEDY), GREEDY, {version + 1})

    subject.run(main)


def test_close_ends_what_runs_and_refuses_what_comes(subject: Subject) -> None:
    """The last one: the engine is not used after it."""

    async def main() -> None:
        (running,) = await subject.begun("running")
        await subject.engine.close()
        try:
            expect_sound(await running, LONG, {subject.engine.version})
        except RuntimeError as error:
            assert "closed" in str(error)
        await subject.engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await subject.engine.generate("late", PROMPT, GREEDY)

    subject.run(main)
