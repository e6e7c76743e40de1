"""`Routing` chooses the engine of a request by the engines' loads and by the prompt tokens that each has cached.

    a later turn of an episode -> the engine of the turn before, unless that has far more to do than another
    any other request          -> the engine with the lowest cost: samples in flight - worth of what it has cached

A cached prompt is worth as many samples as could be generated in the time that computing the prompt takes. So samples
of the same prompt go to one engine until the others have so much less to do that computing the prompt again costs less.
Where no engine has cached much of a request, the engine with the fewest samples in flight is chosen. Nothing here does
input or output, so the simulation in `tools/measure/routing.py` runs this code.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

BLOCK = 64
"""Number of tokens of a block. It is a multiple of vLLM's blocks on GPUs, so that a block is cached as a whole."""
DECODE_WORK = 1.0
"""Work of generating a token in a full batch, in prompt tokens that an engine computes in the same time."""
ANSWER_TOKENS = 256.0
"""Number of tokens that an answer is expected to have before any was seen."""
LEARNING_RATE = 1 / 64
"""Weight of the newest answer in the mean number of tokens of an answer."""
CACHED_WORTH = 2.0
"""Worth of a cached prompt token, in prompt tokens to compute. It is more than 1, because a prompt that is cached by
several engines also takes the room of other prompts in each of them."""
LEAST_SAVED = 512
"""Smallest difference of cached prompt tokens between engines that counts."""
OVERLOAD, OVERLOAD_SAMPLES = 2.0, 8.0
"""A session leaves its engine when that has more samples in flight than OVERLOAD times those of the least loaded engine
and OVERLOAD_SAMPLES more."""
REPORT_HALF_LIFE_S = 1.0
"""Seconds after which an engine's report about other routers' samples counts half."""
MAX_SESSIONS = 1 << 16
"""Largest number of sessions (episodes of several turns) for which the router remembers the engine. The next turn of a
forgotten session may go to another engine, which costs only a new prefill."""


def block_hashes(token_ids: Sequence[int] | np.ndarray, before: int = 0) -> list[int]:
    """Return a hash for each full block of tokens, which depends on all tokens up to the block's end. before: hash of
    the block before the first one, or a number that tells apart prompts with the same tokens."""
    if isinstance(token_ids, np.ndarray):
        data = np.ascontiguousarray(token_ids, np.int32).data.cast("B")
    else:
        data = memoryview(array("i", token_ids)).cast("B")  # NumPy takes longer for a list.
    digest, size, hashes = xxhash.xxh3_64_intdigest, BLOCK * 4, list[int]()
    for start in range(0, len(data) - size + 1, size):
        before = digest(data[start : start + size], before)
        hashes.append(before)
    return hashes


class PrefixCache:
    """Estimate of the blocks whose keys and values an engine holds. The engine forgets the least recently used blocks
    first, and the last block of a sequence before the others; so it never holds a block without those before it."""

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: number of tokens for which the engine's cache has room; 0 for an engine that reuses nothing."""
        self._room = num_tokens // BLOCK
        self._blocks: dict[int, None] = {}  # The least recently used block comes first.

    def cached(self, blocks: Sequence[int]) -> int:
        """Return the number of tokens of the leading blocks that are held. blocks: see `block_hashes`."""
        low, high = 0, len(blocks) if self._blocks else 0
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in self._blocks:
                low = middle + 1
            else:
                high = middle
        return low * BLOCK

    def add(self, blocks: Sequence[int]) -> None:
        """Add the blocks of a sequence that the engine computes or uses now."""
        held = self._blocks
        for block in reversed(blocks[: self._room]):
            held.pop(block, None)
            held[block] = None
        while len(held) > self._room:
            del held[next(iter(held))]

    def clear(self) -> None:
        """Forget all blocks, because the engine does not use them any more."""
        self._blocks.clear()


@dataclass(slots=True, eq=False)
class EngineLoad:
    """The work and the cache of an engine, as far as the router knows them."""

    cache: PrefixCache
    samples: int = 0
    """Number of this router's samples that the engine is generating now."""
    assigned: int = 0
    """Number of samples ever sent to the engine. If several engines have an equal load, the one with the lowest number
    gets the next request."""
    others: float = 0.0
    """Number of samples of other routers that the engine was generating at its last report."""
    reported_s: float = 0.0
    """Time of that report, in seconds."""

    def foreign(self, now: float) -> float:
        """Return the estimated number of samples of other routers that the engine is generating now."""
        return self.others and self.others * 0.5 ** ((now - self.reported_s) / REPORT_HALF_LIFE_S)

    def report(self, in_flight: int, now: float) -> None:
        """Take note that the engine is generating `in_flight` samples, for all routers together."""
        self.others, self.reported_s = float(max(0, in_flight - self.samples)), now


@dataclass(slots=True, eq=False)
class RoutedPrompt:
    """The parts of a request on which the choice of its engine depends."""

    session: str | None
    """Session (episode of several turns) of the request; None for a request of its own."""
    samples: int
    blocks: Sequence[int] = ()
    """Hashes of the prompt's blocks; see `block_hashes`."""
    salt: int = 0
    """Number from which the hash of the first block was made."""


class Routing:
    """Policy of a router: it chooses engines, and keeps their loads up to date."""

    def __init__(self, *, prefixes: bool) -> None:
        """prefixes: False ignores what engines have cached. Each request then goes to the engine with the fewest
        samples in flight, and all turns of a session to the same engine. Prompts must then have no blocks."""
        self.prefixes = prefixes
        self.answer_tokens = ANSWER_TOKENS
        """Mean number of tokens of the latest answers."""
        self._homes: OrderedDict[str, EngineLoad] = OrderedDict()
        """Engine of the last turn of each session."""

    def choose(self, engines: Sequence[EngineLoad], prompt: RoutedPrompt, now: float = 0.0) -> EngineLoad:
        """Return the engine for a request. engines: those that take requests, at least one."""
        loads = [engine.samples + engine.foreign(now) for engine in engines]
        home = None if prompt.session is None else self._homes.get(prompt.session)
        if home is not None and home in engines:
            limit = OVERLOAD * min(loads) + OVERLOAD_SAMPLES
            if not self.prefixes or loads[engines.index(home)] <= limit:
                return home
        costs, work = loads, DECODE_WORK * self.answer_tokens
        if prompt.blocks:
            cached = [engine.cache.cached(prompt.blocks) for engine in engines]
            if max(cached) - min(cached) >= max(LEAST_SAVED, work):
                costs = [load - CACHED_WORTH * found / work for load, found in zip(loads, cached, strict=True)]
        ranked = zip(costs, loads, (engine.assigned for engine in engines), range(len(engines)), strict=True)
        return engines[min(ranked)[-1]]

    def begin(self, engine: EngineLoad, prompt: RoutedPrompt) -> None:
        """Count a request that is sent to an engine."""
        engine.samples += prompt.samples
        engine.assigned += prompt.samples
        engine.cache.add(prompt.blocks)
        if prompt.session is not None:
            self._homes[prompt.session] = engine
            self._homes.move_to_end(prompt.session)
            if len(self._homes) > MAX_SESSIONS:
                self._homes.popitem(last=False)

    def end(self, engine: EngineLoad, prompt: RoutedPrompt) -> None:
        """Count a request that the engine has ended, whether it answered or not."""
        engine.samples -= prompt.samples

    def learn(self, num_tokens: int) -> None:
        """Take note of the number of tokens of an answer."""
        self.answer_tokens += LEARNING_RATE * (num_tokens - self.answer_tokens)
