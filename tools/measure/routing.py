"""`python tools/measure/routing.py` simulates engines behind a router, and compares the policies of `rollout.routing`.

Episodes of several turns call their tools between the turns. Each engine computes prompts and generates in one batch,
keeps the keys and values of blocks of tokens, and forgets the least recently used ones. The policies are those that the
router uses (`actors/engines/routing.py`). All numbers of random traces follow from a seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from headrace.actors.engines.routing import BLOCK, EngineLoad, PrefixCache, RoutedPrompt, Routing

POLICIES = ("prefix", "least_loaded", "stateless")
"""`stateless` is `least_loaded` without sessions: each turn goes to the engine with the fewest samples in flight."""
STEPS_AT_ONCE = 8
"""Largest number of decode steps between two looks at new requests."""


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Speed and size of a simulated engine."""

    prefill_tokens_per_s: float = 274_000.0
    """Prompt tokens that an engine computes per second."""
    step_s: float = 3.15e-3
    """Seconds of a decode step, without its samples."""
    row_s: float = 38e-6
    """Further seconds of a decode step for each sample."""
    max_rows: int = 256
    step_tokens: int = 8192
    """Largest number of prompt tokens of a step."""
    cache_tokens: int = 160_000
    """Number of tokens for which the key-value cache has room."""


SOURCE = "routing_gpu.py: a 0.6B shape with vLLM 0.26 on an H200, 2026-11-28"
"""Where the default numbers of EngineFigures come from."""


@dataclass(frozen=True, slots=True)
class Turn:
    given: int
    """Number of tokens that the turn appends before the answer: the result of a tool."""
    answer: int
    """Number of tokens of the answer."""
    wait_s: float
    """Seconds between the answer before and this turn."""


@dataclass(frozen=True, slots=True)
class Episode:
    group: int
    prompt: int
    """Number of tokens of the prompt that all episodes of the group share."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Work of a simulation."""

    episodes: tuple[Episode, ...]
    engines: int
    in_flight: int
    """Largest number of episodes that are open at the same time."""
    common: int = 0
    """Number of first tokens that the prompts of all groups share."""
    figures: EngineFigures = EngineFigures()


@dataclass(slots=True)
class _Request:
    episode: int
    turn: int
    prompt: RoutedPrompt
    tokens: int
    """Number of tokens of the prompt."""
    answer: int
    blocks: list[int]
    """Hashes of the full blocks of prompt and answer."""
    load: EngineLoad | None = None
    prefill: int = 0
    """Number of prompt tokens that are still to be computed."""


class _Engine:
    """A simulated engine. Blocks in use cannot be forgotten; a request waits until there is room for all of its
    blocks."""

    def __init__(self, figures: EngineFigures) -> None:
        self.figures = figures
        self.load = EngineLoad(PrefixCache(figures.cache_tokens))
        self.waiting: deque[_Request] = deque()
        self.prefilling: deque[_Request] = deque()
        self.rows: list[list] = []
        """Pairs of the number of tokens left and the request, of each sample that is being generated."""
        self.busy = False
        self.busy_s = 0.0
        self.hits = self.prompts = 0
        self._room = figures.cache_tokens // BLOCK
        self._used: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()

    def _admit(self) -> None:
        while self.waiting and len(self.rows) + len(self.prefilling) < self.figures.max_rows:
            request = self.waiting[0]
            new = sum(block not in self._used for block in request.blocks)
            if len(self._used) + new > self._room and self._used:
                return
            self.waiting.popleft()
            held = 0
            for block in request.blocks[: request.tokens // BLOCK]:
                if block not in self._used and block not in self._free:
                    break
                held += 1
            request.prefill = max(1, request.tokens - held * BLOCK)
            self.prompts += request.tokens
            self.hits += request.tokens - request.prefill
            for block in request.blocks:
                self._free.pop(block, None)
                self._used[block] = self._used.get(block, 0) + 1
            while len(self._used) + len(self._free) > self._room and self._free:
                self._free.popitem(last=False)
            self.prefilling.append(request)

    def step(self) -> tuple[float, list[_Request]]:
        """Run one or several steps. Returns their seconds and the requests that end then."""
        self._admit()
        figures, budget, ready, steps = self.figures, self.figures.step_tokens, list[_Request](), 1
        while self.prefilling and budget:
            request = self.prefilling[0]
            taken = min(budget, request.prefill)
            budget -= taken
            request.prefill -= taken
            if not request.prefill:
                ready.append(self.prefilling.popleft())
        computed = figures.step_tokens - budget
        if not computed and self.rows:
            steps = min(STEPS_AT_ONCE, min(row[0] for row in self.rows))
        seconds = steps * (figures.step_s + figures.row_s * len(self.rows)) + computed / figures.prefill_tokens_per_s
        ended = [row[1] for row in self.rows if row[0] <= steps]
        self.rows = [[left - steps, request] for left, request in self.rows if left > steps]
        for request in ready:
            if request.answer > 1:
                self.rows.append([request.answer - 1, request])
            else:
                ended.append(request)
        for request in ended:
            self._release(request)
        self.busy_s += seconds
        return seconds, ended

    def _release(self, request: _Request) -> None:
        for block in reversed(request.blocks):
            self._used[block] -= 1
            if not self._used[block]:
                del self._used[block]
                self._free[block] = None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.rows)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a simulation."""

    seconds: float
    tokens_per_s: float
    """Generated tokens per second, from the first request to the last answer."""
    hit_share: float
    """Share of the prompt tokens that were cached."""
    computed: int
    """Number of prompt tokens that the engines computed."""
    idle_share: float
    """Mean share of the time in which an engine had no work."""


class _World:
    def __init__(self, trace: Trace, policy: str) -> None:
        self.trace, self.policy = trace, policy
        self.routing = Routing(prefixes=policy == "prefix")
        self.engines = [_Engine(trace.figures) for _ in range(trace.engines)]
        self.by_load = {id(engine.load): engine for engine in self.engines}
        self.events: list[tuple[float, int, str, object]] = []
        self.order = itertools.count()
        self.to_open = iter(range(len(trace.episodes)))

    def push(self, when: float, kind: str, what: object) -> None:
        heapq.heappush(self.events, (when, next(self.order), kind, what))

    def request(self, index: int, turn: int) -> _Request:
        episode, trace = self.trace.episodes[index], self.trace
        before = episode.prompt + sum(one.given + one.answer for one in episode.turns[:turn])
        tokens, answer = before + episode.turns[turn].given, episode.turns[turn].answer
        blocks = [
            hash((2, i) if end <= trace.common else (0, episode.group, i) if end <= episode.prompt else (1, index, i))
            for i, end in enumerate(range(BLOCK, tokens + answer + 1, BLOCK))
        ]
        session = None if self.policy == "stateless" else str(index)
        return _Request(
            index,
            turn,
            RoutedPrompt(session, 1, blocks[: tokens // BLOCK] if self.routing.prefixes else ()),
            tokens,
            answer,
            blocks,
        )

    def run(self) -> Outcome:
        now = 0.0
        for index in itertools.islice(self.to_open, self.trace.in_flight):
            self.push(0.0, "send", self.request(index, 0))
        while self.events:
            now, _, kind, what = heapq.heappop(self.events)
            if kind == "send":
                assert isinstance(what, _Request)
                self._send(what, now)
            else:
                engine, ended = what  # type: ignore[misc]
                for request in ended:
                    self._answered(request, now)
                self._go(engine, now)
        tokens = sum(turn.answer for episode in self.trace.episodes for turn in episode.turns)
        prompts = sum(engine.prompts for engine in self.engines)
        hits = sum(engine.hits for engine in self.engines)
        idle = statistics.mean(1 - engine.busy_s / now for engine in self.engines)
        return Outcome(now, tokens / now, hits / prompts, prompts - hits, idle)

    def _send(self, request: _Request, now: float) -> None:
        load = self.routing.choose([engine.load for engine in self.engines], request.prompt, now)
        self.routing.begin(load, request.prompt)
        request.load = load
        engine = self.by_load[id(load)]
        engine.waiting.append(request)
        if not engine.busy:
            self._go(engine, now)

    def _go(self, engine: _Engine, now: float) -> None:
        engine.busy = engine.has_work
        if engine.busy:
            seconds, ended = engine.step()
            self.push(now + seconds, "step", (engine, ended))

    def _answered(self, request: _Request, now: float) -> None:
        assert request.load is not None
        self.routing.end(request.load, request.prompt)
        self.routing.learn(request.answer)
        request.load.cache.add(request.blocks)
        turns, following = self.trace.episodes[request.episode].turns, request.turn + 1
        if following < len(turns):
            self.push(now + turns[following].wait_s, "send", self.request(request.episode, following))
        elif (index := next(self.to_open, None)) is not None:
            self.push(now, "send", self.request(index, 0))


def simulate(trace: Trace, policy: str) -> Outcome:
    """Return the outcome of the trace's work with one of POLICIES."""
    return _World(trace, policy).run()


def _episode(
    rng: random.Random, group: int, prompt: int, turns: int, answer: float, sigma: float, wait: float
) -> Episode:
    skew = rng.lognormvariate(0.0, sigma)  # Long episodes have long answers in all turns.
    drawn = [max(1, min(2048, round(answer * skew * rng.lognormvariate(0.0, sigma / 2)))) for _ in range(turns)]
    return Episode(
        group,
        prompt,
        tuple(
            Turn(rng.randint(32, 256) if index else 0, length, rng.expovariate(1 / wait) if index else 0.0)
            for index, length in enumerate(drawn)
        ),
    )


def shown_trace(engines: int = 4, seed: int = 0, *, prompt: int = 6144, episodes: int = 256) -> Trace:
    """Return the work of the GPU bench: episodes of 8 turns in groups of 8 that share a long prompt. The lengths of
    their answers are skewed."""
    rng = random.Random(seed)
    drawn = [_episode(rng, index // 8, prompt, 8, 48, 0.8, 0.25) for index in range(episodes)]
    return Trace(tuple(drawn), engines, episodes)


def random_trace(seed: int) -> Trace:
    """Return a trace of which everything is drawn. One in five has no shared prompt, and one in ten has one engine."""
    rng = random.Random(seed)
    group = 1 if seed % 5 == 0 else rng.choice((2, 4, 8, 16))
    prompt = rng.choice((32, 256, 1024, 4096, 12288))
    turns = rng.choice((1, 2, 4, 8, 16))
    answer, sigma, wait = rng.choice((16, 64, 256)), rng.uniform(0.0, 1.2), rng.choice((0.01, 0.2, 2.0))
    count = rng.choice((256, 384, 512))
    episodes = [
        _episode(rng, index // group, prompt, max(1, round(turns * rng.uniform(0.5, 1.5))), answer, sigma, wait)
        for index in range(count)
    ]
    figures = EngineFigures(
        prefill_tokens_per_s=rng.choice((20_000.0, 60_000.0, 150_000.0)),
        step_s=rng.choice((3e-3, 8e-3)),
        row_s=rng.choice((20e-6, 60e-6)),
        max_rows=rng.choice((64, 256)),
        cache_tokens=rng.choice((60_000, 160_000, 600_000)),
    )
    engines = 1 if seed % 10 == 1 else rng.choice((2, 3, 4, 8))
    common = 0 if group == 1 else rng.choice((0, prompt // 2))
    return Trace(tuple(episodes), engines, rng.choice((count, count // 2)), common, figures)


def speedups(trace: Trace) -> tuple[dict[str, Outcome], float, float]:
    """Return the outcomes by policy, and tokens/s of `prefix` over those of `least_loaded` and of `stateless`."""
    found = {policy: simulate(trace, policy) for policy in POLICIES}
    rate = found["prefix"].tokens_per_s
    return found, rate / found["least_loaded"].tokens_per_s, rate / found["stateless"].tokens_per_s


def main() -> None:
    """Print a line for each trace: those of the GPU bench, and as many random ones as the first argument says."""
    begun, count = time.perf_counter(), int(sys.argv[1]) if len(sys.argv) > 1 else 50
    print(f"engine: {EngineFigures()} ({SOURCE})")
    traces = {f"shown, {engines} engines": shown_trace(engines) for engines in (1, 2, 4)}
    for name, trace in (traces | {f"random {seed}": random_trace(seed) for seed in range(count)}).items():
        found, sessions, stateless = speedups(trace)
        shares = ", ".join(f"{policy} {one.hit_share:.2f} / {one.idle_share:.2f}" for policy, one in found.items())
        print(
            f"{name:17} {sessions:.3f} x least_loaded, {stateless:.3f} x stateless; cached / idle: {shares}", flush=True
        )
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
