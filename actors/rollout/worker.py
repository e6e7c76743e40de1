"""`RolloutWorker` turns prompts into rewarded rows and puts them into the data plane; the driver gets only reports.

    positions -> prompts -> environment + engine (all at once) -> rewards -> journal -> put, group by group -> report
        |                                                                                ^
        +-- groups that the journal has from before a kill ------------------------------+

A group is all rows of one prompt. Groups that finish while an earlier group is being put (written to the data plane)
are put together in the next call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...codecs.schema import Schema
from ...dataplane.client.async_client import AsyncDataPlaneClient
from ...dataplane.meta import POSITION
from ..columns import ColumnConfig
from ..engines.engine_use import EngineMeter
from ..engines.protocol import Generator, SamplingParams, ServingEngine
from ..engines.router import LeftOut
from ..engines.tokenizer import encode_prompts
from ..environments.config import OnFailure
from ..protocols import EPISODE_ERRORS, GroupPlayer, Prompt, Sample, Score, Span
from ..rewards.rubric import Rubric
from ..sample_file import TRAINING, SampleFile, episode_line
from .evaluation_metrics import VALIDATION, FigureScheme, FigureSums
from .journal import JournaledGroup, KnownGroups
from .pictures.picture_rows import RowPictures
from .prompts import PromptStream, row_key
from .results import EvaluationReport, RolloutReport, RolloutTally, group_figures, token_figures
from .rows import (
    MaskCounts,
    MaskRules,
    RolloutRows,
    RouteCounts,
    RouteRules,
    TeacherSources,
    checked_masks,
    checked_routes,
    checked_scores,
    join,
    rollout_rows,
    sample_keys,
)
from .scorer import Scorer
from .turn_journal import TurnJournal

_log = logging.getLogger(__name__)
_RESTORED_TOGETHER = 16
"""Largest number of groups from the journal that are written to the data plane in one call."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Prompts of one evaluation, and how the samples of these prompts are judged."""

    prompts: PromptStream
    num_prompts: int
    """Number of prompts of a whole evaluation, from position 0 on."""
    rubric: Rubric
    reward_timeout_s: float
    """Time limit in seconds for the reward functions of one sample."""
    prefix: str = VALIDATION
    """First part of the evaluation's metric keys."""
    correct: str | None = None
    """Rule by which a sample counts as correct; see `FigureScheme`."""


class RolloutWorker:
    """Generates and scores samples of prompts, with an engine, an environment and reward functions. Calls may run
    concurrently."""

    def __init__(
        self,
        *,
        engine: ServingEngine,
        environment: GroupPlayer,
        tokenizer: Any,
        rubric: Rubric,
        prompts: PromptStream,
        held_out: Mapping[str, HeldOut],
        client: AsyncDataPlaneClient,
        journal: KnownGroups | None = None,
        turns: TurnJournal | None = None,
        reward_timeout_s: float = 60.0,
        mask_truncated: bool = False,
        keeps_old_kv: bool = False,
        routes: RouteRules | None = None,
        masks: MaskRules | None = None,
        samples: SampleFile | None = None,
        max_rows: int = 1,
        columns: Sequence[ColumnConfig] = (),
        teachers: TeacherSources | None = None,
        pictures: RowPictures | None = None,
        on_failure: OnFailure | None = None,
        retries: int = 0,
        name: str = "rollout",
    ) -> None:
        """held_out: evaluations that `evaluate` can make, by name. journal: keeps finished groups (all rows of one
        prompt) on disk; None keeps none. turns: keeps the turns of unfinished groups on disk; None keeps none.
        reward_timeout_s: time limit in seconds for the reward functions of one row. mask_truncated, keeps_old_kv,
        max_rows, columns, teachers: see `rollout_rows`. routes: the routes that the engine records and rows carry,
        where an episode is one row; None without router replay. masks: what the sampling masks of rows must
        be; None for rows without masks. samples: file of episodes for people to read; None writes none. pictures: those
        of prompts and rows; None if prompts have none. on_failure, retries: see `EnvironmentConfig`. name: name of the
        actor, which is that of an engine in its own process."""
        self._engine = engine
        self._environment = environment
        self._tokenizer = tokenizer
        self._rubric = rubric
        self._prompts = prompts
        self._held_out = held_out
        self._client = client
        self._journal = journal
        self._turns = turns
        self._left_out: list[LeftOut] = []
        self._open: set[_OpenCall] = set()
        self.progress = 0
        """Number that grows when calls make progress: whenever the episodes of a prompt end, a sample is scored, or
        finished groups are recorded or written to the data plane."""
        self._scorer = Scorer(on_failure or OnFailure(), retries, self._step)
        self._reward_timeout_s = reward_timeout_s
        self._mask_truncated = mask_truncated
        self._keeps_old_kv = keeps_old_kv
        self._routes = routes
        self._masks = masks
        self._samples = samples
        self._max_rows = max_rows
        self._columns = tuple(columns)
        self._teachers = teachers
        self._pictures = pictures
        self._meter = EngineMeter(name, engine)

    def note_left_out(self, engine: LeftOut) -> None:
        """Record that the router removed `engine` from routing, so that the next report mentions it."""
        self._left_out.append(engine)

    async def rollout(
        self,
        positions: Sequence[int],
        partition: str,
        params: SamplingParams,
        fresh: bool = False,
        traced: bool = False,
    ) -> RolloutReport:
        """Generate and score `params.n` samples for each prompt at `positions`, and write them to `partition`.
        Positions are those of the prompt stream; each sample is one or more rows of the data plane's partition.

        Each finished group (all rows of one prompt) is written as a whole, and its rows have the keys
        `{prompt_uid}.{sample}`, with `+{row}` after those of a sample's further rows. Groups that are in the journal
        are written unchanged, unless `fresh` is True: then all groups are generated, and replace those in the journal.
        traced: True if the report should contain spans.

        A row fails if its rewards fail or take too long, if its generation is aborted, or if its episode fails with one
        of EPISODE_ERRORS. A failed row is also written, but masked: its response_mask, its log-probs and its tags
        `valid` and `reward` are 0. `environment.on_failure` can have it trained on with the reward 0 instead, or have
        FailureStopsRun raised. If an episode fails with another error, a write fails, or the call is cancelled, the
        remaining episodes are ended before the error is raised; groups already written stay in the data plane.
        """
        tally, call = RolloutTally(), _OpenCall()
        self._open.add(call)
        try:
            await self._roll_out(call, tally, positions, partition, params, fresh)
        finally:
            self._open.discard(call)
            await _end(list(call.episodes))
        left_out, self._left_out = self._left_out, []
        if not traced:
            tally.spans.clear()
        report = replace(tally.report(self._client.stats.take(), left_out), engines=self._meter.take())
        return report if self._pictures is None else replace(report, pictures=self._pictures.pool.take_counts())

    def picture_schema(self) -> Schema:
        """Return the declaration of the rows' column of pictures, as the only field; no field without pictures."""
        return Schema([] if self._pictures is None else [self._pictures.field])

    def end_rollouts(self) -> None:
        """Make all running `rollout` calls return early, with only the groups that are already finished."""
        for call in self._open:
            call.end()

    async def _roll_out(
        self,
        call: _OpenCall,
        tally: RolloutTally,
        positions: Sequence[int],
        partition: str,
        params: SamplingParams,
        fresh: bool,
    ) -> None:
        ends: list[float] = []  # Seconds from the call's start to the end of each group.
        finished: asyncio.Queue[asyncio.Task[list[Sample]]] = asyncio.Queue()
        wall, clock = time.time(), time.perf_counter()
        restored = [] if fresh else await self._journaled(positions)  # A replay restores all groups.
        known = {group.position for group in restored}
        if self._turns is not None and not fresh:
            await self._turns.refresh()
        episodes = call.begin(
            {
                asyncio.create_task(self._train_episodes(position, params, tally, fresh)): position
                for position in positions
                if position not in known
            }
        )
        for task in episodes:
            task.add_done_callback(lambda _: ends.append(time.perf_counter() - clock))
            task.add_done_callback(self._step)
            task.add_done_callback(finished.put_nowait)
        for first in range(0, len(restored), _RESTORED_TOGETHER):
            groups = restored[first : first + _RESTORED_TOGETHER]
            await self._put(join([group.rows for group in groups]), partition, tally)
            for group in groups:
                tally.add(group.figures, restored=True)
        left = len(episodes)
        while left:
            done = await _drain(finished)
            left -= len(done)
            by_position = {episodes[task]: task.result() for task in done if not task.cancelled()}
            if not left:
                tally.generate_s = ends[-1]
                tally.spans += generation_spans(wall, ends, list(episodes.values()))
            if by_position:
                await self._score_and_put(by_position, partition, tally)

    async def evaluate(
        self, name: str, part: int, parts: int, params: SamplingParams, in_flight: int
    ) -> EvaluationReport:
        """Generate and score `params.n` samples for each prompt of one part of the evaluation `name`. There are `parts`
        parts of about equal size. Returns the sums of its metrics. Nothing is written to the data plane.

        part: index of the part. in_flight: largest number of prompts whose samples are generated at the same time; 0
        means no limit. Raises KeyError if the worker has no evaluation of that name.
        """
        held_out = self._held_out[name]
        bounds = [held_out.num_prompts * index // parts for index in (part, part + 1)]
        tally, places = (
            _EvaluationTally(FigureScheme(held_out.prefix, held_out.correct)),
            asyncio.Semaphore(in_flight or max(1, bounds[1])),
        )

        async def play(position: int) -> None:
            async with places:
                group = await self._episodes(held_out.prompts[position], self._engine, params)
            self._step()
            scores = await self._scorer.score(group, held_out.rubric, held_out.reward_timeout_s)
            tally.add(group, scores)
            written = self._samples is not None and position < self._samples.config.groups
            await self._write_samples(name, group, scores, np.full(len(group), written))

        prompts = [asyncio.create_task(play(position)) for position in range(*bounds)]
        try:
            await asyncio.gather(*prompts)
        finally:
            await _end(prompts)
        return tally.report()

    async def trim_journal(self, first: int, outstanding: Sequence[int]) -> None:
        """Remove from the journal the groups that a checkpoint covers. Those are the groups of all positions below
        `first`, except the positions in `outstanding` (see `GroupJournal.trim`). Does nothing without a journal."""
        if self._journal is not None:
            await asyncio.to_thread(self._journal.trim, first, outstanding)
        if self._turns is not None:
            await self._turns.trim(first, outstanding)

    async def close(self) -> None:
        """Close the environment, the journal and the data-plane client; the engine is closed by its creator.
        Idempotent."""
        try:
            await self._environment.close()
            for rubric in (self._rubric, *(one.rubric for one in self._held_out.values())):
                if rubric.apart is not None:
                    await rubric.apart.close()
        finally:  # This block runs even if a user's environment raises an error.
            if self._pictures is not None:
                await self._pictures.pool.close()
            if self._turns is not None:
                await self._turns.close()
            if self._journal is not None:
                self._journal.close()
            await self._client.close()

    # ---------------- These methods are private.

    async def _train_episodes(
        self, position: int, params: SamplingParams, tally: RolloutTally, fresh: bool
    ) -> list[Sample]:
        """Play the episodes of a training prompt, which continue from the turns in the journal."""
        if self._turns is None:
            return await self._episodes(self._prompts[position], self._engine, params)
        engine = await self._turns.engine(position, self._engine, fresh=fresh)
        samples = await self._episodes(self._prompts[position], engine, params)
        tally.add_recovered(engine)
        return samples

    async def _episodes(self, prompt: Prompt, engine: Generator, params: SamplingParams) -> list[Sample]:
        try:
            if self._pictures is not None:
                prompt = await self._pictures.prepared(prompt)
            return await self._environment.run(prompt, engine, self._tokenizer, params)
        except EPISODE_ERRORS as error:
            return _failed_samples(prompt, self._tokenizer, params.n, f"{type(error).__name__}: {error}")

    async def _journaled(self, positions: Sequence[int]) -> list[JournaledGroup]:
        journal = self._journal
        if journal is None:
            return []
        if self._pictures is not None:
            return await self._pictures.find_all(journal, positions, self._prompts)
        return await asyncio.to_thread(journal.find_all, positions)

    async def _score_and_put(self, groups: Mapping[int, list[Sample]], partition: str, tally: RolloutTally) -> None:
        """Score finished groups (prompt position -> samples), and write them to the journal and the data plane."""
        samples = [sample for group in groups.values() for sample in group]
        with _span(tally, "reward"):
            scores = await self._scorer.score(samples, self._rubric, self._reward_timeout_s)
        routes: list[np.ndarray] = []
        counts: list[RouteCounts] = []
        if self._routes is not None:
            with _span(tally, "routes"):
                checked = await asyncio.to_thread(checked_routes, samples, scores, self._routes)
            routes, scores, counts = checked.columns, checked.scores, checked.counts
        masks = None
        if self._masks is not None:
            masks = await asyncio.to_thread(checked_masks, samples, scores, self._masks, self._max_rows)
            scores = masks.scores
        scores = checked_scores(self._columns, samples, scores)
        if self._pictures is not None:
            samples, scores = self._pictures.checked(samples, scores)
        batch, tags = rollout_rows(
            samples,
            scores,
            self._rubric.names,
            mask_truncated=self._mask_truncated,
            keeps_old_kv=self._keeps_old_kv,
            routes=routes,
            spec=None if self._routes is None else self._routes.spec,
            max_rows=self._max_rows,
            columns=self._columns,
            teachers=self._teachers,
        )
        if masks is not None:
            batch = masks.added_to(batch)
        sizes = [self._max_rows * len(group) for group in groups.values()]
        tags[POSITION] = np.repeat(np.fromiter(groups, np.int64), sizes)
        keys = [key for sample in samples for key in sample_keys(sample, self._max_rows)]
        rows = RolloutRows(keys, self._versions(samples), tags, batch)
        if self._pictures is not None:
            rows = self._pictures.with_column(rows, samples, self._max_rows)
        await self._keep(rows, scores, groups, tally, counts, () if masks is None else masks.counts)
        await self._put(rows, partition, tally)
        picked = [self._samples is not None and self._samples.picks(position) for position in groups]
        await self._write_samples(TRAINING, samples, scores, np.repeat(picked, [len(g) for g in groups.values()]))

    async def _keep(
        self,
        rows: RolloutRows,
        scores: Sequence[Score],
        groups: Mapping[int, list[Sample]],
        tally: RolloutTally,
        routes: Sequence[RouteCounts] = (),
        masks: Sequence[MaskCounts] = (),
    ) -> None:
        """Add finished groups to the tally and write them to the journal. rows, scores, routes, masks: rows, scores and
        counts of routes and masks of all groups, in order.

        Groups with failed rows are written only if the journal is meant for a replay (purpose `record`). After a resume
        they are generated again, so that a reward function that has since been fixed can score them.
        """
        kept, left, counts, sets = [], list(scores), list(routes), list(masks)
        parts = rows.split([self._max_rows * len(samples) for samples in groups.values()])
        for (position, samples), part in zip(groups.items(), parts, strict=True):
            size = len(samples)
            figures = group_figures(samples, left[:size], counts[:size], sets[:size])
            figures = replace(figures, **token_figures(part))
            del left[:size], counts[:size], sets[:size]
            tally.add(figures)
            if not figures.failed or (self._journal is not None and self._journal.purpose == "record"):
                kept.append(JournaledGroup(position, part, figures))
        if self._journal is not None and kept:
            with _span(tally, "journal"):
                await asyncio.to_thread(self._journal.append, kept)
        self._step()

    async def _put(self, rows: RolloutRows, partition: str, tally: RolloutTally) -> None:
        with _span(tally, "put"):
            values = rows.batch if self._pictures is None else self._pictures.values(rows)
            await self._client.put(partition, rows.keys, values, versions=rows.versions, tags=rows.tags)
        self._step()

    async def _write_samples(
        self, name: str, samples: Sequence[Sample], scores: Sequence[Score], picked: np.ndarray
    ) -> None:
        """Append the picked samples to the file of episodes. name: the held-out set that they belong to, or `TRAINING`.
        picked: True for each sample to write, bool `[N]`."""
        file = self._samples
        if file is None or not picked.any():
            return
        chosen = [(samples[index], scores[index]) for index in np.flatnonzero(picked).tolist()]
        tokenizer, most = self._tokenizer, file.config.max_tokens

        def write() -> None:
            file.append(
                [episode_line(tokenizer, s, score, row_key(s.prompt.uid, s.index), most, name) for s, score in chosen]
            )

        try:
            await asyncio.to_thread(write)
        except Exception as error:  # A tokenizer can raise anything, and training does not depend on this file.
            _log.warning("%d samples are not written: %s: %s", len(chosen), type(error).__name__, error)

    def _versions(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return the policy version of the oldest token of each row's sample, int64 `[N]`. A sample without tokens from
        the policy gets the version that the engine serves."""
        versions = np.repeat(np.array([sample.version for sample in samples], dtype=np.int64), self._max_rows)
        return np.where(versions < 0, self._engine.version, versions)

    def _step(self, _: object = None) -> None:
        """Add one to `progress`. The ignored argument allows this method to be used as a callback of tasks."""
        self.progress += 1


def generation_spans(wall: float, ends: Sequence[float], positions: Sequence[int]) -> list[Span]:
    """Return trace spans for the generation of one `rollout` call: the whole, until its first group, and its tail.

    The tail is the time in which the last quarter of the groups was finished. wall: Unix time in seconds at which the
    call started. ends: seconds from then until each group was finished, ascending. positions: positions of the prompts
    in the prompt stream, used in the name of the span.
    """
    first, last = min(positions), max(positions)
    prompts = f"{first}" if first == last else f"{first}-{last}"
    spans = [Span(f"generate {prompts}", wall, ends[-1])]
    if len(ends) > 1:
        tail_s = ends[3 * len(ends) // 4 - 1]
        spans += [Span("first group", wall, ends[0]), Span("tail", wall + tail_s, ends[-1] - tail_s)]
    return spans


def _failed_samples(prompt: Prompt, tokenizer: Any, count: int, error: str) -> list[Sample]:
    """Return `count` failed samples for a prompt whose episodes failed. Each holds the tokens of the prompt alone."""
    (ids,) = encode_prompts(tokenizer, [prompt.text], [prompt.rendered])
    ids = ids.astype(np.int32)
    return [
        Sample(
            prompt=prompt,
            index=index,
            input_ids=ids,
            pictures=prompt.prepared,
            response_mask=np.zeros(len(ids), np.uint8),
            logprobs=np.zeros(len(ids), np.float32),
            text="",
            finish_reason="error",
            versions=np.full(len(ids), -1, np.int32),
            error=error,
            failure="environment",
        )
        for index in range(count)
    ]


class _EvaluationTally:
    def __init__(self, scheme: FigureScheme) -> None:
        self._figures = FigureSums(scheme)
        self._rows = self._failed = 0
        self._first_error = ""
        self._versions: set[int] = set()

    def add(self, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
        """Add the scored samples of one prompt."""
        self._figures.add_group(samples, scores)
        self._rows += len(samples)
        failed = [score.error for score in scores if not score.valid]
        self._failed += len(failed)
        self._first_error = self._first_error or next(filter(None, failed), "")
        for sample in samples:
            self._versions.update(np.unique(sample.versions).tolist())

    def report(self) -> EvaluationReport:
        versions = self._versions - {-1}
        return EvaluationReport(
            rows=self._rows,
            failed=self._failed,
            first_error=self._first_error,
            first_version=min(versions, default=-1),
            last_version=max(versions, default=-1),
            sums=self._figures.sums,
            counts=self._figures.counts,
        )


class _OpenCall:
    def __init__(self) -> None:
        self.episodes: dict[asyncio.Task[list[Sample]], int] = {}
        """Tasks that generate the samples: task -> position of its prompt in the prompt stream."""
        self._ended = False

    def begin(self, episodes: dict[asyncio.Task[list[Sample]], int]) -> dict[asyncio.Task[list[Sample]], int]:
        self.episodes = episodes
        if self._ended:
            self.end()
        return episodes

    def end(self) -> None:
        self._ended = True
        for task in self.episodes:
            task.cancel()


async def _drain(finished: asyncio.Queue[asyncio.Task[list[Sample]]]) -> list[asyncio.Task[list[Sample]]]:
    """Wait until at least one task has finished, and return all tasks that have finished by then."""
    done = [await finished.get()]
    while not finished.empty():
        done.append(finished.get_nowait())
    return done


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the running tasks and wait until they have ended, so that no task outlives its call."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _span(tally: RolloutTally, name: str) -> Iterator[None]:
    wall, clock = time.time(), time.perf_counter()
    yield
    tally.spans.append(Span(name, wall, time.perf_counter() - clock))
