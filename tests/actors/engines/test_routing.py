"""Tests of the choice of engines by load and cached prompts."""

from __future__ import annotations

import random
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.engines.routing import (
    BLOCK,
    OVERLOAD_SAMPLES,
    EngineLoad,
    PrefixCache,
    RoutedPrompt,
    Routing,
    block_hashes,
)


def prompt_of(seed: int, blocks: int = 32, session: str | None = None) -> RoutedPrompt:
    rng = random.Random(seed)
    return RoutedPrompt(session, 1, block_hashes([rng.randrange(1000) for _ in range(blocks * BLOCK)]))


def engines(count: int, room: int = 1 << 20) -> list[EngineLoad]:
    return [EngineLoad(PrefixCache(room)) for _ in range(count)]


def send(routing: Routing, loads: list[EngineLoad], prompt: RoutedPrompt) -> int:
    """Send a request that stays in flight. Returns the number of its engine."""
    chosen = routing.choose(loads, prompt)
    routing.begin(chosen, prompt)
    return loads.index(chosen)


def test_a_blocks_hash_depends_on_all_tokens_before_its_end() -> None:
    ids = list(range(5 * BLOCK + 3))
    hashes = block_hashes(ids)
    assert len(hashes) == 5 and len(set(hashes)) == 5
    assert block_hashes(np.array(ids, np.int64)) == hashes
    assert block_hashes(ids[2 * BLOCK :], hashes[1]) == hashes[2:], "a sequence is hashed in pieces"
    changed = block_hashes([ids[0], 7, *ids[2:]])
    assert not set(changed) & set(hashes)
    assert not set(block_hashes(ids, 1)) & set(hashes)
    assert block_hashes(ids[: BLOCK - 1]) == []


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), max_size=40),
)
def test_a_cache_holds_the_latest_blocks_and_never_one_without_those_before_it(
    room: int, used: list[tuple[int, int]]
) -> None:
    cache, chains = PrefixCache(room * BLOCK), {name: prompt_of(name, 8).blocks for name in range(4)}
    for name, length in used:
        cache.add(chains[name][:length])
        assert cache.cached(chains[name]) >= min(length, room) * BLOCK, "what was used last is held"
        held = {other: cache.cached(blocks) // BLOCK for other, blocks in chains.items()}
        assert sum(held.values()) <= room
        for other, count in held.items():
            assert all(cache.cached(chains[other][: n + 1]) == min(n + 1, count) * BLOCK for n in range(8))
    cache.clear()
    assert not any(cache.cached(blocks) for blocks in chains.values())


def test_groups_that_share_a_prompt_go_where_it_is_cached() -> None:
    routing, loads = Routing(prefixes=True), engines(4)
    homes = [{send(routing, loads, prompt_of(group)) for _ in range(8)} for group in range(4)]
    assert [len(home) for home in homes] == [1] * 4 and set().union(*homes) == {0, 1, 2, 3}
    plain, loads = Routing(prefixes=False), engines(4)
    assert {send(plain, loads, RoutedPrompt(None, 1)) for _ in range(8)} == {0, 1, 2, 3}


def test_a_popular_prompt_is_computed_by_more_engines_when_its_engine_has_much_to_do() -> None:
    routing, loads = Routing(prefixes=True), engines(3)
    chosen = [send(routing, loads, prompt_of(1)) for _ in range(90)]
    assert set(chosen[:8]) == {0} and set(chosen) == {0, 1, 2}
    counts = [chosen.count(engine) for engine in range(3)]
    assert max(counts) - min(counts) < 40


def test_an_episode_stays_until_its_engine_is_overloaded_and_then_stays_elsewhere() -> None:
    for prefixes in (True, False):
        routing, loads = Routing(prefixes=prefixes), engines(2)
        turn = RoutedPrompt("episode", 1, prompt_of(0, 4).blocks if prefixes else ())
        first = send(routing, loads, turn)
        routing.end(loads[first], turn)
        loads[first].samples += int(OVERLOAD_SAMPLES)
        assert loads.index(routing.choose(loads, turn)) == first
        loads[first].samples += 1
        moved = send(routing, loads, turn)
        assert moved == (1 - first if prefixes else first)
        loads[first].samples = 0
        assert loads.index(routing.choose(loads, turn)) == moved
        assert routing.choose(loads[:1], turn) is loads[0], "an engine that takes no requests is no choice"


def test_an_engine_that_joins_gets_the_next_requests() -> None:
    routing, loads = Routing(prefixes=True), engines(2)
    for group in range(20):
        send(routing, loads, prompt_of(group))
    loads += engines(1)
    assert [send(routing, loads, prompt_of(group)) for group in range(100, 110)] == [2] * 10


def test_engines_without_a_cache_are_chosen_as_by_load_alone() -> None:
    rng, by_prefix, by_load = random.Random(3), Routing(prefixes=True), Routing(prefixes=False)
    ones, others = engines(3, room=0), engines(3)
    for number in range(200):
        prompt, plain = prompt_of(number % 5), RoutedPrompt(None, 1)
        chosen = send(by_prefix, ones, prompt)
        assert chosen == send(by_load, others, plain)
        if rng.random() < 0.7:
            by_prefix.end(ones[chosen], prompt)
            by_load.end(others[chosen], plain)


def test_reports_of_other_routers_samples_count_less_with_time() -> None:
    routing, loads = Routing(prefixes=True), engines(2)
    loads[0].report(in_flight=10, now=100.0)
    loads[1].samples = 2
    prompt = RoutedPrompt(None, 1)
    assert routing.choose(loads, prompt, now=100.0) is loads[1]
    assert routing.choose(loads, prompt, now=110.0) is loads[0]
    loads[0].report(in_flight=0, now=110.0)
    assert loads[0].foreign(110.0) == 0.0


def test_a_long_prompt_costs_the_router_little() -> None:
    """About 0.7 ms at 32k tokens on the machine where it was written; the bound is for a slow one."""
    rng, routing, loads = random.Random(0), Routing(prefixes=True), engines(8)
    ids = [rng.randrange(150_000) for _ in range(32_768)]
    begun = time.process_time()
    for _ in range(20):
        prompt = RoutedPrompt(None, 1, block_hashes(ids))
        chosen = routing.choose(loads, prompt)
        routing.begin(chosen, prompt)
        routing.end(chosen, prompt)
    assert (time.process_time() - begun) / 20 < 0.02
