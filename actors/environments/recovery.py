"""Recovery answers the policy's requests of a group again from a record, so that a killed episode goes on where it was.

    request -> asked before, with the same tokens? -> the recorded answer, without the engine
            -> else the engine -> recorded -> the environment sees the answer

An episode whose process died is played again from its start. As long as the environment asks what it asked before, the
record answers, and each recorded answer is used once. If the environment asks something else, the engine answers.

An environment that can save its state need not be played again from its start. Its episode is built up to the last
recorded turn, the environment loads its state, and is then played.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import xxhash

from ..columns import TokenValues
from ..engines.protocol import SESSION_SEPARATOR, Completion, Generator, SamplingParams
from ..engines.router import Router


@dataclass(frozen=True, slots=True)
class SavedTurn:
    """State of an episode and its environment when the policy was asked for a turn."""

    index: int
    """Index of the turn in the episode."""
    prompt: int
    """Hash of the tokens that the policy continued from."""
    before: int
    """Hash of the tokens that the policy continued from in the turn before; 0 for the first turn."""
    tail: np.ndarray
    """Tokens that the policy continued from, without those of the turn before, int32 1-D."""
    num_prompt: int
    """Number of tokens that the episode began with."""
    stop: tuple[str, ...]
    max_new_tokens: int | None
    stop_token_ids: tuple[int, ...]
    rewards: dict[str, float]
    columns: dict[str, float]
    token_values: list[TokenValues]
    answer: str | None
    state: bytes
    """State of the environment, encoded by `codecs.messages`."""


def tokens_hash(ids: Sequence[int]) -> int:
    """Return a hash of token ids, which is not 0."""
    return xxhash.xxh3_64_intdigest(np.asarray(ids, np.int32).tobytes()) or 1


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """Answer of the engine to one request of a group, as the journal keeps it."""

    request_id: str
    """Id of the request."""
    key: int
    """Hash of what was asked (`_key`). Requests with equal keys can have the same answer."""
    completions: list[Completion]
    """Answer to the request: its completions in order."""
    saved: SavedTurn | None = None
    """State of the episode at the request; None if the environment does not save its state."""


class TurnLog(Protocol):
    """Protocol of a place where the answers of a group are recorded."""

    async def write(self, record: TurnRecord) -> None:
        """Record an answer. When the call returns, the death of this process no longer loses the answer. Raises
        OSError if it cannot be written."""
        ...


class RecoveringEngine:
    """The engine of one group's episodes, which answers recorded requests from the record and records all others."""

    def __init__(
        self, engine: Generator, log: TurnLog | None, records: Sequence[TurnRecord] = (), piece_tokens: int = 0
    ) -> None:
        """log: place where answers are recorded; None records none. records: answers that were recorded before, in the
        order of their writing. piece_tokens: largest number of tokens that the engine is asked for at once; longer
        answers are made and recorded in pieces. 0 means no limit."""
        self._engine = engine
        self._log = log
        self._piece_tokens = piece_tokens
        self._records: defaultdict[int, list[TurnRecord]] = defaultdict(list)
        self._saved: defaultdict[str, list[SavedTurn]] = defaultdict(list)
        self._to_save: dict[str, SavedTurn] = {}
        """States to be recorded with the answers to requests that are about to begin: request id -> state."""
        seen = set[tuple[int, str]]()
        for record in records:
            # Two processes may have made the same request, because a process that was thought dead still played.
            if (record.key, record.request_id) not in seen:
                seen.add((record.key, record.request_id))
                self._records[record.key].append(record)
            if record.saved is not None:
                self._saved[_session(record.request_id)].append(record.saved)
        self._restored: dict[int, SavedTurn] = {}
        """States from the journal, which are recorded again with their turns: hash of the tokens before -> state."""
        self._asked: dict[str, str] = {}
        """Requests that were answered by the record of another request id: request id -> recorded request id."""
        self._recovered = set[tuple[str, int]]()
        """Turns that came from the record: id of the turn's first request, index of the sample in it."""
        self.recovered_tokens = 0
        """Number of tokens that came from the record."""

    def save(self, request_id: str, saved: SavedTurn) -> None:
        """Record the state of the episode with the answer to its next request."""
        self._to_save[request_id] = saved

    def take_saved(self, name: str) -> list[SavedTurn]:
        """Return the recorded states of the episode `name`, from its first turn to the last; [] if there are none.

        They are given out once. Those of earlier attempts in this process are newer than those of the journal."""
        if name not in self._saved and isinstance(self._engine, RecoveringEngine):
            chain = self._engine.take_saved(name)
            self._restored.update({saved.prompt: saved for saved in chain})
            return chain
        found = self._saved.pop(name, [])
        chain = found[-1:]
        while chain and chain[0].before:
            first = chain[0]
            earlier = (one for one in found if one.prompt == first.before and one.index == first.index - 1)
            chain.insert(0, next(earlier, first))
            if chain[0] is first:
                return []  # The record of a turn is missing.
        return chain

    @property
    def recovered_turns(self) -> int:
        """Number of turns that came from the record, in whole or in part."""
        return len(self._recovered)

    @property
    def unmatched(self) -> int:
        """Number of recorded answers that no request has used."""
        return sum(map(len, self._records.values()))

    @property
    def version(self) -> int:
        """Version of the weights that the engine serves."""
        return self._engine.version

    @property
    def available_share(self) -> float:
        """Share of the engines that take requests (see `Router.available_share`)."""
        return self._engine.available_share if isinstance(self._engine, Router) else 1.0

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return the recorded answer to the request, else the engine's. Raises the errors of `Generator.generate`, and
        OSError if the answer cannot be recorded."""
        saved = self._to_save.pop(request_id, None)
        if saved is None and self._restored:
            saved = self._restored.get(tokens_hash(prompt_ids))
        key = self._key(request_id, prompt_ids, params)
        record = self._take(key, request_id)
        if record is not None:
            begun = params.continues
            samples = range(params.n) if begun is None else [begun.sample]
            self._recovered.update((request_id if begun is None else begun.request_id, sample) for sample in samples)
            self.recovered_tokens += sum(len(completion.token_ids) for completion in record.completions)
            return list(record.completions)
        if saved is not None and isinstance(self._engine, RecoveringEngine):
            self._engine.save(request_id, saved)
        completions = await self._generated(request_id, prompt_ids, params)
        if self._log is not None and any(len(completion.token_ids) for completion in completions):
            made = TurnRecord(request_id, key, completions, saved)
            try:
                await self._log.write(made)
            except asyncio.CancelledError:  # The answer is written all the same, so it must not be made again.
                self._records[key].append(made)
                raise
        return completions

    async def abort(self, request_id: str) -> None:
        """End a request of the engine (see `Generator.abort`)."""
        await self._engine.abort(request_id)

    # ---------------- These methods are private.

    def _key(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Return the hash of what a request asks: the episode, the tokens, and how they are drawn.

        The number of a request in its episode does not count, because an agent's concurrent calls come in any order.
        """
        begun = params.continues
        if begun is None:
            source = _session(request_id)
        else:  # Another sample with the same tokens so far has another rest.
            source = f"{self._asked.get(begun.request_id, begun.request_id)} {begun.sample}"
        limits = (params.n, params.max_new_tokens, params.stop, params.stop_token_ids, params.adapter, params.schema)
        limits += (params.top_p, params.top_k, params.min_p, *(picture.name for picture in params.pictures))
        asked = xxhash.xxh3_64(f"{source} {limits} {params.routes_from}".encode())
        asked.update(np.asarray(prompt_ids, np.int32).tobytes())
        return asked.intdigest()

    def _take(self, key: int, request_id: str) -> TurnRecord | None:
        """Remove and return a recorded answer: that of the same request, else the first one; None if there is none."""
        found = self._records.get(key)
        if not found:
            return None
        index = next((i for i, record in enumerate(found) if record.request_id == request_id), 0)
        record = found.pop(index)
        self._asked[request_id] = record.request_id
        return record

    async def _generated(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return the engine's answer. Completions that end after a piece count as cut off (finish reason `abort`)."""
        piece = 0 if params.schema else self._piece_tokens  # An answer under a schema cannot be continued.
        if not piece or params.max_new_tokens <= piece:
            return await self._engine.generate(request_id, prompt_ids, params)
        asked = replace(params, max_new_tokens=piece)
        completions = await self._engine.generate(request_id, prompt_ids, asked)
        return [replace(one, finish_reason="abort") if one.finish_reason == "length" else one for one in completions]


def _session(request_id: str) -> str:
    return request_id.partition(SESSION_SEPARATOR)[0]
