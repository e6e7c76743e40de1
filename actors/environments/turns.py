"""Generates a turn of an episode to its end, and records the tokens of turns as a transcript.

If a weight update cut off a completion, it continues from its tokens so far, under the new weights. The technique is
the partial rollout of Kimi k1.5 (arXiv:2501.12599 section 2.6.2). Each token keeps the policy version that produced it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...codecs.blobs import Blob
from ...codecs.tokens.masks import first_tokens, without_sets
from ..engines.protocol import SESSION_SEPARATOR, Completion, CutOff, Generator, SamplingParams
from ..engines.token_sampling import StopTexts
from ..protocols import RowTokens

if TYPE_CHECKING:
    from ..images.processor import Prepared  # It imports transformers, which takes seconds.


async def generate_whole(
    engine: Generator, tokenizer: Any, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
) -> list[Completion]:
    """Generate `params.n` completions, and continue those that were cut off (finish_reason `abort`) to their end.

    tokenizer: used to find stop texts that begin before a cut and end after it. Raises the engine's errors, such as
    RuntimeError if the engine is closed.
    """
    completions = await engine.generate(request_id, prompt_ids, params)
    if all(completion.finish_reason != "abort" for completion in completions):
        return completions
    rests = [
        asyncio.create_task(_to_the_end(engine, tokenizer, request_id, index, prompt_ids, params, completion))
        for index, completion in enumerate(completions)
    ]
    try:
        return list(await asyncio.gather(*rests))
    finally:
        for rest in rests:
            rest.cancel()
        await asyncio.gather(*rests, return_exceptions=True)


async def _to_the_end(
    engine: Generator,
    tokenizer: Any,
    request_id: str,
    index: int,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    completion: Completion,
) -> Completion:
    attempt, stops = 0, StopTexts(tokenizer, params.stop) if params.stop else None
    while completion.finish_reason == "abort":
        attempt += 1
        if params.schema:  # A continuation would begin at the start of the schema, so the answer starts again.
            completion = Completion.empty()
        done = len(completion.token_ids)
        ids = [*prompt_ids, *completion.token_ids.tolist()]
        known = 0 if completion.routes is None else len(completion.routes)
        rest = replace(
            params,
            n=1,
            max_new_tokens=params.max_new_tokens - done,
            routes_from=params.routes_from + known,
            continues=CutOff(request_id, index, done),
        )
        [more] = await engine.generate(f"{request_id}.{index}{SESSION_SEPARATOR}again{attempt}", ids, rest)
        completion = _joined(completion, more)
        # The engine looks only at new tokens, so it misses a stop text that began before the cut.
        end = None if stops is None or not done else stops.first_end(completion.token_ids.tolist(), searched=done)
        if end is not None:
            return _first_tokens(completion, end)
    return completion


def _joined(first: Completion, more: Completion) -> Completion:
    """Return a completion and its continuation as one.

    The continuation recomputes all earlier tokens under the new weights, but returns only the routes after those of the
    first part. So an earlier token keeps its route under the version that sampled the next token.
    """
    routes = [one.routes for one in (first, more) if one.routes is not None]
    masks = [one.masks for one in (first, more) if one.masks is not None]
    return Completion(
        token_ids=np.concatenate([first.token_ids, more.token_ids]),
        logprobs=np.concatenate([first.logprobs, more.logprobs]),
        finish_reason=more.finish_reason,
        versions=np.concatenate([first.versions, more.versions]),
        routes=np.concatenate(routes) if routes else None,
        masks=np.concatenate(masks) if masks else None,
    )


def _first_tokens(completion: Completion, end: int) -> Completion:
    """Return the first `end` tokens of a completion, the last of which completes a stop text."""
    routes = completion.routes
    if routes is not None:
        routes = routes[: len(routes) - (len(completion.token_ids) - end)]
    masks = None if completion.masks is None else first_tokens(completion.masks, end)
    return Completion(
        completion.token_ids[:end], completion.logprobs[:end], "stop", completion.versions[:end], routes, masks
    )


class Transcript:
    """The tokens of one conversation so far. Tokens are only appended, so that the tokens of earlier turns stay exactly
    as the engine saw them."""

    def __init__(self, prompt_ids: Sequence[int] | np.ndarray, pictures: Sequence[Prepared] = ()) -> None:
        """prompt_ids: token ids that the conversation begins with, `[P]`; the policy did not choose them. pictures:
        pictures whose placeholder tokens are among them, in order."""
        self._parts: list[tuple[np.ndarray, Completion | None]] = []
        """Token ids of each part, with the completion that has its log-probs and versions; None for tokens that the
        policy did not choose."""
        self._routes: list[tuple[int, np.ndarray]] = []
        self.pictures = tuple(pictures)
        """Pictures whose placeholder tokens the conversation has, in order."""
        self._length = 0
        self.give(prompt_ids)
        self.num_prompt = self._length
        """Number of tokens that the conversation began with."""

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> list[int]:
        """All token ids so far."""
        return [token for ids, _ in self._parts for token in ids.tolist()]

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The pictures as engines get them."""
        return tuple(picture.blob for picture in self.pictures)

    def own_places(self, tokens: Sequence[int], length: int) -> tuple[int, ...]:
        """Return the positions among the first `length` tokens where the policy sampled one of `tokens`."""
        row = self.row()
        found = np.isin(row.input_ids[:length], tokens) & (row.response_mask[:length] == 1)
        return tuple(np.flatnonzero(found).tolist())

    def give(self, ids: Sequence[int] | np.ndarray, pictures: Sequence[Prepared] = ()) -> None:
        """Append tokens that the policy did not choose, such as a user's words or the result of a tool. They are not
        trained on. pictures: pictures whose placeholder tokens are among them, in order."""
        self.pictures += tuple(pictures)
        self._append(np.asarray(ids, np.int32).reshape(len(ids)))

    @property
    def num_routes(self) -> int:
        """Number of the first tokens whose routes are known; 0 if the engine records none."""
        return max((start + len(routes) for start, routes in self._routes), default=0)

    def choose(self, completion: Completion, routes_from: int = 0, *, trained: bool = True) -> None:
        """Append the tokens of one turn of the policy, and the routes that came with them. routes_from: index of the
        first token whose route was requested. trained: False for tokens that count like a user's, because they were
        not drawn from the policy's own distribution."""
        if completion.routes is not None:
            self._routes.append((routes_from, completion.routes))
        if not trained:
            self.give(completion.token_ids)
            return
        self._append(np.asarray(completion.token_ids, np.int32), completion)

    def _append(self, ids: np.ndarray, completion: Completion | None = None) -> None:
        self._parts.append((ids, completion))
        self._length += len(ids)

    def row(self) -> RowTokens:
        """Return the columns of all tokens so far."""
        mask, logprobs = np.zeros(self._length, np.uint8), np.zeros(self._length, np.float32)
        versions, start = np.full(self._length, -1, np.int32), 0
        masked = any(chosen is not None and chosen.masks is not None for _, chosen in self._parts)
        sets = [
            without_sets(len(ids)) if chosen is None or chosen.masks is None else chosen.masks
            for ids, chosen in self._parts
        ]
        for ids, chosen in self._parts:
            stop = start + len(ids)
            if chosen is not None:
                mask[start:stop], logprobs[start:stop], versions[start:stop] = 1, chosen.logprobs, chosen.versions
            start = stop
        masks = np.concatenate(sets) if masked else None
        ids = np.concatenate([ids for ids, _ in self._parts])
        return RowTokens(ids, mask, logprobs, versions, tuple(self._routes), self.pictures, masks)
