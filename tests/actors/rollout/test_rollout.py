"""The rollout worker: rows, masks, tags and reports; what happens when rewards, puts or episodes fail."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import EngineDied, SamplingParams
from headrace.actors.engines.router import LeftOut
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.environments.config import EnvironmentConfig
from headrace.actors.environments.factory import SingleTurn, build_environment
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.environments.turns import Transcript
from headrace.actors.protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA, Prompt, row_schema
from headrace.actors.rewards.builtin import EnvironmentReward, exact_match, per_position
from headrace.actors.rewards.rubric import Rubric
from headrace.actors.rollout.prompt_sources import TaskSource
from headrace.actors.rollout.prompts import PromptStream
from headrace.actors.rollout.results import merge_reports
from headrace.actors.rollout.rows import version_spans
from headrace.actors.rollout.worker import HeldOut, RolloutWorker, generation_spans
from headrace.actors.sample_file import SampleFile, SamplesConfig
from headrace.codecs.batch import Batch
from headrace.dataplane.factory import DataPlane, connect, connect_async
from headrace.dataplane.traffic import ClientStats, Traffic
from headrace.testing.data_plane import open_plane
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver
from headrace.trainers.observe.samples import read_samples

PARTITION = "train"
EOS = 2


@pytest.fixture
def plane() -> Iterator[DataPlane]:
    with open_plane() as opened:
        connect(opened.handle).register(PARTITION, ROLLOUT_SCHEMA, ["train"], group_size=2)
        yield opened


def rubric(*extra: tuple[str, Any, float]) -> Rubric:
    return Rubric([("exact_match", exact_match, 0.5), ("per_position", per_position, 0.5), *extra])


def right_then_wrong(tokenizer: Any) -> Any:
    """Sample 0 reverses the digits, sample 1 repeats them, further ones ramble on without an end."""

    def script(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
        digits = list(prompt_ids[1:-1])
        if sample == 0:
            return [*reversed(digits), EOS]
        return [*digits, EOS] if sample == 1 else digits * 20

    return script


def evaluations() -> dict[str, HeldOut]:
    """Validation on 30 prompts, and a named set on the same prompts that is judged by `exact_match`."""
    prompts = PromptStream(TaskSource("reverse", held_out=True), shuffle=False, uid_prefix="val-")
    named = Rubric([("exact_match", exact_match, 1.0)], voter="exact_match")
    return {
        "validation": HeldOut(prompts, 30, rubric(), 60.0),
        "evaluation.set": HeldOut(prompts, 10, named, 60.0, "eval/set", "exact_match"),
    }


def worker(engine: Any, tokenizer: Any, client: Any, rewards: Rubric | None = None, **options: Any) -> RolloutWorker:
    """options: what else a worker takes, in place of the defaults here."""
    made: dict[str, Any] = {
        "environment": EpisodeHost(SingleTurn()),
        "prompts": PromptStream(TaskSource("reverse", held_out=False)),
        "held_out": evaluations(),
        "reward_timeout_s": 60.0,
    }
    made |= {"engine": engine, "tokenizer": tokenizer, "client": client, "rubric": rewards or rubric(), **options}
    return RolloutWorker(**made)


def test_picked_groups_and_held_out_prompts_are_written_for_people(tokenizer: Any, tmp_path: Path) -> None:
    file = SampleFile(str(tmp_path / "samples.jsonl"), SamplesConfig(every=2, groups=1), prompts_per_step=4)
    rollouts = worker(ScriptedEngine(right_then_wrong(tokenizer), version=7), tokenizer, FakeClient(), samples=file)
    params = SamplingParams(n=2, max_new_tokens=12)
    asyncio.run(rollouts.rollout(range(12), PARTITION, params))
    asyncio.run(rollouts.evaluate("validation", 0, 1, SamplingParams(n=1, max_new_tokens=12), 0))
    rows = read_samples(file.path)
    assert sorted((row["set"], row["key"]) for row in rows) == [
        ("train", "0.0"), ("train", "0.1"), ("train", "8.0"), ("train", "8.1"), ("validation", "val-0.0"),
    ]  # fmt: skip
    right = next(row for row in rows if row["key"] == "8.0")
    assert right["turns"][0]["text"] == right["answer"] + "<eos>" and right["reward"] == 1.0 and right["version"] == 7
    assert right["prompt"] == PromptStream(TaskSource("reverse", held_out=False))[8].text
    assert set(right["rewards"]) == {"exact_match", "per_position"}


def test_samples_that_cannot_be_written_cost_no_row(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise OverflowError("no such token")

    monkeypatch.setattr("headrace.actors.rollout.worker.episode_line", broken)
    file = SampleFile(str(tmp_path / "samples.jsonl"), SamplesConfig(), prompts_per_step=4)
    rollouts = worker(ScriptedEngine(right_then_wrong(tokenizer)), tokenizer, FakeClient(), samples=file)
    report = asyncio.run(rollouts.rollout(range(2), PARTITION, SamplingParams(n=2, max_new_tokens=12)))
    assert (report.rows, report.failed) == (4, 0)
    assert "samples are not written: OverflowError: no such token" in caplog.text


def spans_of(batch: Batch) -> list[list[list[int]]]:
    """`version_spans`, row by row."""
    spans = batch.ragged("version_spans")
    rows = np.split(spans.values.numpy(), np.cumsum(spans.shapes.prod(axis=1))[:-1])
    return [row.reshape(-1, 2).tolist() for row in rows]


class FakeClient:
    """A data-plane client that remembers its puts, or fails them."""

    def __init__(self, error: Exception | None = None, delay_s: float = 0.0) -> None:
        self.puts: list[tuple[list[str], Batch, dict[str, np.ndarray]]] = []
        self.versions: list[int] = []
        self.error, self.delay_s = error, delay_s
        self.closed = False
        self.stats = ClientStats()

    async def put(self, partition: str, keys: list[str], batch: Batch, *, versions: np.ndarray, tags: dict) -> None:
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        self.puts.append((keys, batch, tags))
        self.versions += versions.tolist()
        self.stats.count_call("put", 0.0)

    async def close(self) -> None:
        self.closed = True


# ---------------------------------------------------------------- rows


def test_rows_in_the_data_plane(plane: DataPlane, tokenizer: Any) -> None:
    prompts = PromptStream(TaskSource("reverse", held_out=False))

    async def run() -> Any:
        engine = ScriptedEngine(right_then_wrong(tokenizer), version=7)
        rollouts = worker(engine, tokenizer, connect_async(plane.handle, name="rollout"))
        report = await rollouts.rollout(range(10, 14), PARTITION, SamplingParams(n=2, max_new_tokens=12), traced=True)
        await rollouts.close()
        return report

    report = asyncio.run(run())
    client = connect(plane.handle)
    meta = client.claim(PARTITION, "train", ROLLOUT_FIELDS, 8, whole_groups=True, timeout_s=5)
    batch = client.get(meta)
    assert (meta.versions == 7).all()
    assert sorted(meta.keys) == sorted(f"{prompts[position].uid}.{i}" for position in range(10, 14) for i in range(2))
    by_uid = {prompts[position].uid: prompts[position] for position in range(10, 14)}
    starts = np.cumsum([0, *meta.lengths])
    for row, key in enumerate(meta.keys):
        uid, sample = key.split(".")
        prompt = by_uid[uid]
        response = prompt.answer if sample == "0" else prompt.answer[::-1]
        span = slice(starts[row], starts[row + 1])
        ids = [*tokenizer(prompt.text)["input_ids"], *tokenizer(response)["input_ids"], EOS]
        mask = [0] * len(prompt.text) + [1] * (len(response) + 1)
        assert batch.jagged("input_ids").values[span].tolist() == ids
        assert batch.jagged("response_mask").values[span].tolist() == mask
        assert batch.jagged("rollout_logprobs").values[span].tolist() == [-1.0 * m for m in mask]
        assert spans_of(batch)[row] == [[0, -1], [len(prompt.text), 7]]
        expected = rubric().score(prompt, response, "stop")
        assert meta.tags["reward"][row] == np.float32(expected.reward) and meta.tags["valid"][row] == 1.0
        assert meta.tags["response_length"][row] == len(response) + 1
        assert meta.tags["reward"].dtype == np.float32
    assert (report.rows, report.failed, report.first_error, report.truncated) == (8, 0, "", 0)
    assert report.response_tokens == meta.tags["response_length"].sum()
    assert report.prompt_tokens == meta.lengths.sum() - report.response_tokens
    assert report.reward_sum / report.valid == pytest.approx(meta.tags["reward"].mean())
    assert report.component_sums["exact_match"] >= 0.5 * report.valid
    traffic = Traffic.from_bytes(report.traffic)
    assert traffic.bytes_put >= 9 * meta.lengths.sum() and traffic.of("put").calls >= 1
    assert {span.name for span in report.spans.to_spans()} == {"generate 10-13", "first group", "tail", "reward", "put"}


def test_the_trace_shows_when_the_first_group_and_the_last_quarter_were_finished() -> None:
    spans = generation_spans(1000.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 30.0], [*range(16, 24)])
    assert [(span.name, span.start_s, span.dur_s) for span in spans] == [
        ("generate 16-23", 1000.0, 30.0), ("first group", 1000.0, 1.0), ("tail", 1006.0, 24.0),
    ]  # fmt: skip
    assert [(span.name, span.dur_s) for span in generation_spans(0.0, [2.0], [7])] == [("generate 7", 2.0)]
    _, first, tail = generation_spans(0.0, [2.0, 5.0], [8, 9])
    assert (first.dur_s, tail.start_s, tail.dur_s) == (2.0, 2.0, 3.0)


def test_a_real_model_end_to_end(plane: DataPlane, model_folder: str, tokenizer: Any, tmp_path: Path) -> None:
    async def run() -> None:
        engine, publisher = HfEngine(model_folder, receiver=receiver()), Publisher(tmp_path)
        rollouts = worker(engine, tokenizer, connect_async(plane.handle))
        params = SamplingParams(n=2, max_new_tokens=8)
        first = await rollouts.rollout(range(16), PARTITION, params)
        named = {name: p.detach() * 1.1 for name, p in engine._model.named_parameters()}
        await engine.prepare_weights(publisher.publish(1, named))
        await engine.commit_weights(1)
        second = await rollouts.rollout(range(16, 32), PARTITION, params)
        publisher.close()
        await engine.close()
        await rollouts.close()
        assert first.rows == second.rows == 32 and 0 < first.response_tokens / first.rows <= 8
        merged = merge_reports([first, second])
        assert merged.rows == 64 and merged.reward_sum == pytest.approx(first.reward_sum + second.reward_sum)

    asyncio.run(run())
    client = connect(plane.handle)
    meta = client.claim(PARTITION, "train", ROLLOUT_FIELDS, 64, timeout_s=5)
    assert sorted(meta.versions) == [0] * 32 + [1] * 32
    batch = client.get(meta)
    mask = batch.jagged("response_mask").values.bool()
    logprobs = batch.jagged("rollout_logprobs").values
    assert (logprobs[mask] < 0).all() and (logprobs[~mask] == 0).all()
    for spans, version in zip(spans_of(batch), meta.versions, strict=True):
        assert spans[0] == [0, -1] and spans[1][1] == version and len(spans) == 2


def test_a_commit_in_mid_rollout_shows_in_the_rows(tokenizer: Any, tmp_path: Path) -> None:
    async def run() -> tuple[FakeClient, Any]:
        client, publisher = FakeClient(), Publisher(tmp_path)
        engine = ScriptedEngine(right_then_wrong(tokenizer), latency_s=0.4, receiver=receiver(), version=3)
        rollouts = worker(engine, tokenizer, client)
        await engine.prepare_weights(publisher.publish(4, {"w": torch.ones(1)}))
        call = asyncio.create_task(rollouts.rollout(range(2), PARTITION, SamplingParams(n=3, max_new_tokens=12)))
        await asyncio.sleep(0.2)
        await engine.commit_weights(4, "keep")
        report = await call
        publisher.close()
        return client, report

    client, report = asyncio.run(run())
    assert report.rows == 6 and set(client.versions) == {3}, "a row is as old as its oldest token"
    rows = [row for _, batch, _ in client.puts for row in spans_of(batch)]
    assert len(rows) == 6
    for spans in rows:
        assert [version for _, version in spans] == [-1, 3, 4]
        starts = [start for start, _ in spans]
        assert starts[0] == 0 and starts == sorted(set(starts))


def test_version_spans_against_a_loop_over_tokens() -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([5, 0, 1, 17, 0, 3])
    versions = rng.integers(-1, 2, lengths.sum()).astype(np.int32)
    spans = version_spans(versions, lengths)
    expected = []
    for row in np.split(versions, np.cumsum(lengths)[:-1]):
        expected.append([[i, int(v)] for i, v in enumerate(row) if i == 0 or row[i - 1] != v])
    assert spans.shapes.tolist() == [[len(row), 2] for row in expected]
    assert spans.values.dtype == torch.int32
    assert spans.values.tolist() == [number for row in expected for span in row for number in span]


def test_failed_rows_are_masked_counted_and_cost_no_other_row(tokenizer: Any) -> None:
    def picky(prompt: Prompt, response: str, finish_reason: str) -> float:
        if finish_reason == "length":
            raise RuntimeError("no end")
        return 1.0

    client = FakeClient()
    engine = ScriptedEngine(right_then_wrong(tokenizer))
    rollouts = worker(engine, tokenizer, client, rubric(("picky", picky, 1.0)))
    report = asyncio.run(rollouts.rollout(range(3), PARTITION, SamplingParams(n=3, max_new_tokens=10)))
    assert (report.rows, report.failed, report.valid, report.truncated) == (9, 3, 6, 3)
    said = re.compile(r"reward 'picky' raised RuntimeError: no end \(test_rollout.py line \d+\)")
    assert len(report.errors) == 3 and all(said.fullmatch(error) for error in report.errors)
    assert report.component_sums["picky"] == report.valid and report.reward_sum >= 1.5 * report.valid
    for keys, batch, tags in client.puts:
        failed = np.array([key.endswith(".2") for key in keys])
        assert np.array_equal(tags["valid"], (~failed).astype(np.float32))
        assert (tags["reward"][failed] == 0).all() and (tags["reward"][~failed] >= 1).all()
        tokens = torch.from_numpy(np.repeat(failed, batch.jagged("input_ids").lengths))
        assert (batch.jagged("response_mask").values[tokens] == 0).all()
        assert (batch.jagged("rollout_logprobs").values[tokens] == 0).all()
        assert (batch.jagged("input_ids").values[tokens] > 0).all()


def test_groups_are_put_as_they_finish_and_share_a_put_when_they_can(tokenizer: Any) -> None:
    client = FakeClient(delay_s=0.02)
    engine = ScriptedEngine(right_then_wrong(tokenizer), latency_s=0.02, latency_sigma=1.0)
    rollouts = worker(engine, tokenizer, client)
    report = asyncio.run(rollouts.rollout(range(20), PARTITION, SamplingParams(n=2)))
    keys = [key for put, _, _ in client.puts for key in put]
    assert len(set(keys)) == len(keys) == report.rows == 40 and 1 < len(client.puts) < 20
    for put, _, _ in client.puts:
        uids = [key.split(".")[0] for key in put]
        assert all(uids.count(uid) == 2 for uid in uids), "a group was torn apart"
    at_once = FakeClient()
    together = worker(ScriptedEngine(right_then_wrong(tokenizer)), tokenizer, at_once)
    asyncio.run(together.rollout(range(20), PARTITION, SamplingParams(n=2)))
    assert len(at_once.puts) <= 2


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("failure", ["put", "engine", "cancel"])
def test_nothing_outlives_a_failed_call(tokenizer: Any, failure: str) -> None:
    async def run() -> None:
        client = FakeClient(error=RuntimeError("store is gone") if failure == "put" else None)
        count = 0

        def script(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
            nonlocal count
            count += 1
            if failure == "engine" and count > 2:
                raise RuntimeError("engine broke")
            return [5, EOS]

        engine = ScriptedEngine(script, latency_s=0.05, latency_sigma=2.0)
        rollouts = worker(engine, tokenizer, client)
        call = asyncio.create_task(rollouts.rollout(range(20), PARTITION, SamplingParams(n=2)))
        if failure == "cancel":
            await asyncio.sleep(0.05)
            call.cancel()
        with pytest.raises(asyncio.CancelledError if failure == "cancel" else RuntimeError):
            await call
        assert asyncio.all_tasks() == {asyncio.current_task()}, "episodes were left running"
        assert not engine._requests, "requests were left in the engine"
        await rollouts.close()
        assert client.closed

    started = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - started < 2


def test_a_slow_reward_does_not_hold_up_other_calls(tokenizer: Any) -> None:
    def slow(prompt: Prompt, response: str, finish_reason: str) -> float:
        time.sleep(0.05)
        return 1.0

    async def run() -> None:
        rollouts = worker(
            ScriptedEngine(right_then_wrong(tokenizer)), tokenizer, FakeClient(), Rubric([("s", slow, 1.0)])
        )
        call = asyncio.create_task(rollouts.rollout(range(4), PARTITION, SamplingParams(n=2)))
        await asyncio.sleep(0.05)
        waits = []
        while not call.done():
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            waits.append(time.perf_counter() - before)
        assert len(waits) > 20 and np.median(waits) < 0.02

    asyncio.run(run())


def test_aborted_rows_are_not_trained_on(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an environment that takes what it gets, instead of `generate_whole`."""

    async def cut(engine: Any, tokenizer: Any, *request: Any) -> Any:
        return await engine.generate(*request)

    monkeypatch.setattr("headrace.actors.environments.episode.generate_whole", cut)

    async def run() -> None:
        client = FakeClient()
        engine = ScriptedEngine(right_then_wrong(tokenizer), latency_s=30.0, version=5)
        rollouts = worker(engine, tokenizer, client)
        call = asyncio.create_task(rollouts.rollout(range(2), PARTITION, SamplingParams(n=2)))
        await asyncio.sleep(0.02)
        await engine.close()
        report = await call
        assert report.failed == report.rows == 4 and report.first_error == "prompt '0': generation aborted"
        assert all((tags["valid"] == 0).all() for _, _, tags in client.puts)
        assert client.versions == [5] * 4, "rows without a token have the engine's version"

    asyncio.run(run())


def test_engines_left_out_are_reported_once(tokenizer: Any) -> None:
    rollouts = worker(ScriptedEngine(right_then_wrong(tokenizer)), tokenizer, FakeClient())
    gone = LeftOut("engine 1", "EngineDied: process 7 is gone")
    rollouts.note_left_out(gone)
    first = asyncio.run(rollouts.rollout(range(1), PARTITION, SamplingParams()))
    second = asyncio.run(rollouts.rollout(range(1, 2), PARTITION, SamplingParams()))
    assert (first.left_out, second.left_out) == ((gone,), ())
    assert merge_reports([first, second, first]).left_out == (gone,)


def test_environment_factory() -> None:
    assert isinstance(build_environment(EnvironmentConfig()), SingleTurn)
    with pytest.raises(ValueError, match="environment.kind: got 'multi'"):
        build_environment(EnvironmentConfig.model_construct(kind="multi"))


def test_stop_texts_stay_in_the_response_and_stop_tokens_do_not(tokenizer: Any) -> None:
    async def run() -> None:
        engine = ScriptedEngine(right_then_wrong(tokenizer), tokenizer=tokenizer)
        prompt = PromptStream(TaskSource("reverse", held_out=False))[0]
        plain = await EpisodeHost(SingleTurn()).run(prompt, engine, tokenizer, SamplingParams(n=2, max_new_tokens=12))
        stop = prompt.answer[:2]
        cut = await EpisodeHost(SingleTurn()).run(
            prompt, engine, tokenizer, SamplingParams(n=2, max_new_tokens=12, stop=(stop,))
        )
        assert plain[0].text == prompt.answer and plain[0].input_ids[-1] == EOS
        assert cut[0].text == stop and cut[0].finish_reason == "stop" and cut[0].input_ids[-1] != EOS

    asyncio.run(run())


# ---------------------------------------------------------------- rewards that hang, episodes that fail


def test_a_reward_that_hangs_fails_its_row_and_no_other(tokenizer: Any) -> None:
    release = threading.Event()

    def judge(prompt: Prompt, response: str, finish_reason: str) -> float:
        if prompt.uid.endswith("1") and not release.is_set():
            release.wait()
        return 1.0

    async def run() -> Any:
        engine, client = ScriptedEngine(right_then_wrong(tokenizer)), FakeClient()
        rollouts = worker(engine, tokenizer, client, rubric(("judge", judge, 1.0)), reward_timeout_s=0.2)
        report = await rollouts.rollout([0, 1, 2], PARTITION, SamplingParams(n=1, max_new_tokens=12))
        async with asyncio.timeout(20):
            await asyncio.to_thread(int)
        return report, client.puts

    try:
        report, puts = asyncio.run(run())
    finally:
        release.set()
    valid = {key: flag for keys, _, tags in puts for key, flag in zip(keys, tags["valid"].tolist(), strict=True)}
    assert (report.rows, report.failed) == (3, 1) and sorted(valid.values()) == [0.0, 1.0, 1.0]
    assert valid["1.0"] == 0.0
    assert report.first_error == "prompt '1': reward 'judge' did not return within reward.timeout_s=0.2 s"


@pytest.mark.long
def test_slow_rewards_of_many_rows_do_not_add_up_to_the_bound_of_one(tokenizer: Any) -> None:
    def judge(prompt: Prompt, response: str, finish_reason: str) -> float:
        time.sleep(0.1)
        return 1.0

    async def run() -> Any:
        engine = ScriptedEngine(right_then_wrong(tokenizer))
        rollouts = worker(engine, tokenizer, FakeClient(), rubric(("judge", judge, 1.0)), reward_timeout_s=0.6)
        return await rollouts.rollout([0], PARTITION, SamplingParams(n=10, max_new_tokens=12))

    assert asyncio.run(run()).failed == 0


@pytest.mark.parametrize("error", [ValueError("the prompt exceeds the context"), FloatingPointError("not finite")])
def test_an_episode_that_fails_makes_failed_rows_of_its_group(tokenizer: Any, error: Exception) -> None:
    class Failing(ScriptedEngine):
        async def generate(self, request_id: str, prompt_ids: Any, params: Any) -> Any:
            if request_id == "1":
                raise error
            return await super().generate(request_id, prompt_ids, params)

    async def run() -> Any:
        engine, client = Failing(right_then_wrong(tokenizer), version=4), FakeClient()
        report = await worker(engine, tokenizer, client).rollout(
            [0, 1], PARTITION, SamplingParams(n=2, max_new_tokens=12)
        )
        return report, client

    report, client = asyncio.run(run())
    assert (report.rows, report.failed) == (4, 2)
    place = f"(test_rollout.py line {Failing.generate.__code__.co_firstlineno + 2})"
    assert report.first_error == f"prompt '1': the episode failed: {type(error).__name__}: {error} {place}"
    rows = {
        key: (valid, length)
        for keys, _, tags in client.puts
        for key, valid, length in zip(keys, tags["valid"].tolist(), tags["response_length"].tolist(), strict=True)
    }
    assert rows["1.0"] == rows["1.1"] == (0.0, 0.0) and rows["0.0"][0] == 1.0 and client.versions == [4] * 4


def test_an_engine_that_died_is_no_failed_row(tokenizer: Any) -> None:
    class Dead(ScriptedEngine):
        async def generate(self, request_id: str, prompt_ids: Any, params: Any) -> Any:
            raise EngineDied("its process is gone")

    async def run() -> None:
        engine = Dead(right_then_wrong(tokenizer))
        await worker(engine, tokenizer, FakeClient()).rollout([0], PARTITION, SamplingParams(n=2, max_new_tokens=12))

    with pytest.raises(EngineDied):
        asyncio.run(run())


def test_an_episode_of_several_rows_is_claimed_with_its_group(tokenizer: Any) -> None:
    """Groups are ready when all rows of all their episodes are there, those that an episode leaves unused included."""

    class TwoRows:
        async def play(self, episode: Any) -> float:
            for text in ("r12=", "r34=")[: 1 + episode.index]:
                ids = episode.encode(text)
                completion, said = await episode.sample_turn(ids, 12)
                episode.record(Transcript(ids), completion, said)
            return 1.0

    async def run(handle: Any) -> Any:
        config = EnvironmentConfig(max_rows=3)
        engine, client = ScriptedEngine(right_then_wrong(tokenizer), version=2), connect_async(handle, name="rollout")
        rewards = Rubric([("environment", EnvironmentReward(), 1.0)])
        host = EpisodeHost(TwoRows(), config)
        rollouts = worker(engine, tokenizer, client, rewards, environment=host, max_rows=config.max_rows)
        report = await rollouts.rollout([0, 1], PARTITION, SamplingParams(n=2, max_new_tokens=12))
        assert (report.rows, report.failed) == (4, 0), report.first_error
        await rollouts.close()
        return report

    with open_plane() as plane:
        client = connect(plane.handle)
        client.register(PARTITION, row_schema(None, several_rows=True), ["train"], group_size=6)
        report = asyncio.run(run(plane.handle))
        meta = client.claim(PARTITION, "train", ROLLOUT_FIELDS, 12, whole_groups=True, timeout_s=5)
        assert len(meta) == 12 and len(set(meta.groups.tolist())) == 2
        assert int(meta.tags["valid"].sum()) == 6 and set(meta.lengths.tolist()) > {1}
        values = client.get(meta).jagged("input_ids").values
        ids = [row.tolist() for row in values.split(meta.lengths.tolist())]
        used = [(group, row) for group, row, valid in zip(meta.groups, ids, meta.tags["valid"], strict=True) if valid]
        repeated = [
            max((len(os.path.commonprefix([row, other])) for past, other in used[:at] if past == group), default=0)
            for at, (group, row) in enumerate(used)
        ]
        assert (report.trained_tokens, report.shareable_tokens) == (sum(len(row) for _, row in used), sum(repeated))
        assert 0 < report.shareable_tokens < report.trained_tokens
