"""The rollout worker: prompts in by position, rewarded rows out into the data plane; the driver sees figures only.

    positions -> prompts -> environment + engine (all prompts at once) -> rewards -> put, group by group -> report

Groups that are finished while the one before is being put share the next put.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..codecs.batch import Batch, Jagged, Ragged
from ..dataplane.async_client import AsyncDataPlaneClient
from .engines.protocol import GenerationEngine, SamplingParams
from .engines.router import LeftOut
from .prompts import PromptStream
from .protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA, Environment, Sample, Score, Span
from .rewards.rubric import Rubric, reward_tag
from .rollout_report import RolloutReport, RolloutTally, ValidationReport


class RolloutWorker:
    """An engine, its environment, rewards and prompts, and a data-plane client. Calls may run concurrently."""

    def __init__(
        self,
        *,
        engine: GenerationEngine,
        environment: Environment,
        tokenizer: Any,
        rubric: Rubric,
        prompts: PromptStream,
        held_out: PromptStream | None,
        client: AsyncDataPlaneClient,
    ) -> None:
        """held_out: prompts of `validate`; None when the run has none."""
        self._engine = engine
        self._environment = environment
        self._tokenizer = tokenizer
        self._rubric = rubric
        self._prompts = prompts
        self._held_out = held_out
        self._client = client
        self._left_out: list[LeftOut] = []
        # Users' reward functions may be slow: beside the event loop, so that generation and other calls go on.
        self._scoring = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards")

    def note_left_out(self, engine: LeftOut) -> None:
        """Have the next report say that `engine` gets no more requests."""
        self._left_out.append(engine)

    async def rollout(self, positions: Sequence[int], partition: str, params: SamplingParams) -> RolloutReport:
        """Roll out the prompts at `positions` of the stream, `params.n` rows each, into `partition`.

        Rows are keyed `{prompt_uid}.{sample}`; each finished group is put as a whole. A row that failed is put too,
        masked: response_mask and log-probs 0, tags `valid` and `reward` 0. When an episode or a put fails, or the
        call is cancelled, the other episodes are ended before the error leaves; groups already put stay.
        """
        tally = RolloutTally()
        finished: asyncio.Queue[asyncio.Task[list[Sample]]] = asyncio.Queue()
        wall, clock = time.time(), time.perf_counter()
        episodes = [asyncio.create_task(self._episodes(self._prompts, position, params)) for position in positions]
        try:
            for task in episodes:
                task.add_done_callback(finished.put_nowait)
            left = len(episodes)
            while left:
                done = await _drain(finished)
                left -= len(done)
                groups = [task.result() for task in done]
                if not left:
                    tally.generate_s = time.perf_counter() - clock
                    tally.spans.append(Span("generate", wall, tally.generate_s))
                await self._score_and_put([sample for group in groups for sample in group], partition, tally)
        finally:
            await _end(episodes)
        left_out, self._left_out = self._left_out, []
        return tally.report(self._client.stats.take(), left_out)

    async def validate(self, start: int, count: int, params: SamplingParams) -> ValidationReport:
        """Answer `count` held-out prompts from `start` on, `params.n` samples each; nothing is put.

        Raises ValueError when the run has no held-out prompts.
        """
        if self._held_out is None:
            raise ValueError("validation: the run has no held-out prompts, expected data.validation to be set")
        episodes = [
            asyncio.create_task(self._episodes(self._held_out, position, params))
            for position in range(start, start + count)
        ]
        try:
            groups = await asyncio.gather(*episodes)
        finally:
            await _end(episodes)
        samples = [sample for group in groups for sample in group]
        scores = await self._score(samples)
        tally = RolloutTally()
        tally.add(samples, scores)
        exact = sum(bool(s.prompt.answer) and s.text.strip() == s.prompt.answer.strip() for s in samples)
        return ValidationReport(
            rows=tally.rows,
            exact_match=exact / tally.rows if tally.rows else 0.0,
            reward=tally.reward_sum / (tally.rows - tally.failed) if tally.rows > tally.failed else 0.0,
            failed=tally.failed,
            first_error=tally.first_error,
            response_length_mean=tally.response_tokens / tally.rows if tally.rows else 0.0,
        )

    async def close(self) -> None:
        """Close engine and client. Idempotent."""
        await self._engine.close()
        self._scoring.shutdown(wait=False, cancel_futures=True)
        await self._client.close()

    # ------------------------------------------------------------ inside

    async def _episodes(self, prompts: PromptStream, position: int, params: SamplingParams) -> list[Sample]:
        return await self._environment.run(prompts[position], self._engine, self._tokenizer, params)

    async def _score_and_put(self, samples: list[Sample], partition: str, tally: RolloutTally) -> None:
        clock = time.perf_counter()
        with _span(tally, "reward"):
            scores = await self._score(samples)
        scored = time.perf_counter()
        batch, tags = rollout_rows(samples, scores, self._rubric.tagged)
        with _span(tally, "put"):
            await self._client.put(
                partition,
                [f"{sample.prompt.uid}.{sample.index}" for sample in samples],
                batch,
                versions=self._versions(samples),
                tags=tags,
            )
        tally.reward_s += scored - clock
        tally.put_s += time.perf_counter() - scored
        tally.add(samples, scores)

    def _versions(self, samples: Sequence[Sample]) -> np.ndarray:
        """int64 `[N]`: of each row's oldest token; of the engine for rows that were aborted before the first."""
        versions = np.array([sample.version for sample in samples], dtype=np.int64)
        return np.where(versions < 0, self._engine.version, versions)

    async def _score(self, samples: list[Sample]) -> list[Score]:
        return await asyncio.get_running_loop().run_in_executor(self._scoring, _score_all, self._rubric, samples)


def rollout_rows(
    samples: Sequence[Sample], scores: Sequence[Score], tagged: Sequence[str] = ()
) -> tuple[Batch, dict[str, np.ndarray]]:
    """The samples as rows of ROLLOUT_FIELDS, and their tags (float32 `[N]` each); failed rows are masked.

    tagged: rewards whose own values are tags, too (`reward_tag`), 0 for failed rows.
    """
    valid = np.array([score.valid for score in scores], dtype=bool)
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    trained = np.repeat(valid, lengths)
    columns = {
        "input_ids": np.concatenate([sample.input_ids for sample in samples]),
        "response_mask": np.concatenate([sample.response_mask for sample in samples]) * trained,
        "rollout_logprobs": np.concatenate([sample.logprobs for sample in samples]) * trained,
    }
    batch = Batch(
        ROLLOUT_SCHEMA.subset(ROLLOUT_FIELDS),
        len(samples),
        {
            **{name: Jagged(torch.from_numpy(column), lengths) for name, column in columns.items()},
            "version_spans": version_spans(np.concatenate([sample.versions for sample in samples]), lengths),
        },
    )
    tags = {
        "reward": np.array([score.reward if score.valid else 0.0 for score in scores], dtype=np.float32),
        "valid": valid.astype(np.float32),
        "response_length": np.array([np.count_nonzero(s.response_mask) for s in samples], dtype=np.float32),
    }
    for name in tagged:
        values = [score.components[name] if score.valid else 0.0 for score in scores]
        tags[reward_tag(name)] = np.array(values, dtype=np.float32)
    return batch, tags


def version_spans(versions: np.ndarray, lengths: np.ndarray) -> Ragged:
    """int32 `[S, 2]` a row: (first token, version of it and those after it), from one version a token.

    versions: int32 `[sum(lengths)]`, the rows one after another. Rows without tokens have no spans.
    """
    row = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    begins = np.ones(len(versions), dtype=bool)
    begins[1:] = (versions[1:] != versions[:-1]) | (row[1:] != row[:-1])
    first = np.flatnonzero(begins)
    spans = np.stack([first - starts[row[first]], versions[first]], axis=1).astype(np.int32)
    counts = np.bincount(row[first], minlength=len(lengths))
    shapes = np.stack([counts, np.full(len(lengths), 2)], axis=1).astype(np.int64)
    return Ragged(torch.from_numpy(spans.reshape(-1)), shapes)


def _score_all(rubric: Rubric, samples: Sequence[Sample]) -> list[Score]:
    return [_score_one(rubric, sample) for sample in samples]


def _score_one(rubric: Rubric, sample: Sample) -> Score:
    if sample.finish_reason == "abort":
        # Cut off by us, not ended by the policy: its reward would say nothing about the policy.
        return Score(reward=0.0, components={}, valid=False, error=f"prompt {sample.prompt.uid!r}: generation aborted")
    tokens = int(np.count_nonzero(sample.response_mask))
    return rubric.score(sample.prompt, sample.text, sample.finish_reason, tokens)


async def _drain(finished: asyncio.Queue[asyncio.Task[list[Sample]]]) -> list[asyncio.Task[list[Sample]]]:
    """At least one finished task, and all others that are finished by now."""
    done = [await finished.get()]
    while not finished.empty():
        done.append(finished.get_nowait())
    return done


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs and wait until it has ended, so that nothing outlives its call."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _span(tally: RolloutTally, name: str) -> Iterator[None]:
    wall, clock = time.time(), time.perf_counter()
    yield
    tally.spans.append(Span(name, wall, time.perf_counter() - clock))
