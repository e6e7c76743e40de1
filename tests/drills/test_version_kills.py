"""Senders and receivers are killed at random buckets: no engine serves a mix, and the next version goes on."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.actors.weight_sync.transports.protocol import ReceiverGroup
from headrace.bench.models import digest_of
from headrace.dataplane.security.handshake import new_key
from headrace.tests.actors.weight_sync.transports.transport_peers import PeerProcess
from headrace.tests.drills.version_ends import NUM_BUCKETS, BroadcastEnd, RankEnd, ServingEnd, weights

ENGINES, RANKS, TIMEOUT_S = 3, 2, 15.0
TRANSPORTS = ("pairs", "pairs on shared gpus", "collective")


class Kills:
    """Ranks and engines, and the version that each engine should serve."""

    def __init__(self, transport: str, seed: str) -> None:
        self.transport, self.dice, self.key = transport, random.Random(seed), new_key()
        self.groups = tuple(ReceiverGroup(f"engine-{number}", 1) for number in range(ENGINES))
        self.engines = [self._engine(number) for number in range(ENGINES)]
        self.expected: list[str | None] = [None] * ENGINES
        self.senders: list[PeerProcess] = []
        self.version = 0
        self.seen: Counter[str] = Counter()
        self.start_senders()

    def _engine(self, number: int) -> PeerProcess:
        return PeerProcess(ServingEnd, f"engine-{number}", TIMEOUT_S, self.key)

    def start_senders(self) -> None:
        """All ranks start again, as those of a run do after one is lost."""
        for sender in self.senders:
            sender.end()
        if self.transport == "collective":
            self.senders = [PeerProcess(BroadcastEnd, TIMEOUT_S, self.key)]
            return
        own = TIMEOUT_S, self.key, self.transport != "pairs"
        self.senders = [PeerProcess(RankEnd, rank, RANKS, *own) for rank in range(RANKS)]
        addresses = [sender.call("address").expect() for sender in self.senders]
        for sender in self.senders:
            sender.call("meet", addresses).expect()

    def look(self) -> None:
        """Compare what a random engine serves now with the version committed there."""
        number = self.dice.randrange(ENGINES)
        served = ask(self.engines[number], "served")
        if served is not None and self.expected[number] is not None:
            assert served == self.expected[number], f"engine {number} serves a mix before version {self.version}"
            self.seen["digests"] += 1

    def update(self, victim: PeerProcess | None = None) -> bool:
        """Send a version, which all engines that live commit or none, and return whether they have. victim: process
        that dies at a random bucket."""
        self.version += 1
        update = self.senders[0].call("open", self.version, self.groups).expect()
        at = self.dice.randrange(NUM_BUCKETS)
        everyone = [*self.engines, *self.senders]
        for peer in everyone:
            peer.call("begin", update, at if peer is victim else None)
        outcomes: dict[PeerProcess, str | None] = {}
        until = time.monotonic() + 3 * TIMEOUT_S
        while len(outcomes) < len(everyone):
            assert time.monotonic() < until, f"version {self.version} has not ended: {outcomes}"
            self.look()
            for peer in everyone:
                answer = ask(peer, "outcome") if peer not in outcomes else None
                if answer is not None or not peer.process.is_alive():
                    outcomes[peer] = answer
        assert [peer for peer in everyone if outcomes[peer] is None] == ([] if victim is None else [victim]), outcomes
        living = [number for number, peer in enumerate(self.engines) if peer is not victim]
        whole = all(outcomes[self.engines[number]] == "" for number in living)
        if victim is None:
            assert whole, outcomes
        elif victim in self.engines and self.transport == "pairs":  # Only those that read its memory are harmed.
            told = [outcomes[self.engines[number]] or "takes buckets for this host" for number in living]
            assert all("takes buckets for this host" in one for one in told), outcomes
        if victim in self.senders:
            assert not whole, outcomes
        digest = digest_of(weights(self.version))
        for number in living:
            self.engines[number].call("commit" if whole else "drop", self.version).expect()
            self.expected[number] = digest if whole else self.expected[number]
            self.look()
        self.seen["committed" if whole else "dropped"] += 1
        return whole

    def kill(self, of: str) -> None:
        """Kill a random sender or engine in an update, replace it, and send the next version to all."""
        victim = self.dice.choice(self.senders if of == "sender" else self.engines)
        self.update(victim)
        self.seen["kills"] += 1
        if of == "sender":
            self.start_senders()
        else:
            number = self.engines.index(victim)
            victim.end()
            self.engines[number], self.expected[number] = self._engine(number), None
        assert self.update()
        for number, engine in enumerate(self.engines):
            assert engine.call("served").expect() == self.expected[number]


def ask(peer: PeerProcess, method: str) -> Any:
    """Return what a call returned; None when the process is dead."""
    try:
        return peer.call(method).expect()
    except (EOFError, OSError):
        peer.process.join(10)
        return None


@contextmanager
def fleet(transport: str, seed: str) -> Iterator[Kills]:
    made = Kills(transport, seed)
    try:
        yield made
    finally:
        for peer in (*made.engines, *made.senders):
            peer.end()


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_sender_and_a_killed_engine(transport: str) -> None:
    with fleet(transport, transport) as kills:
        assert kills.update()
        kills.kill("sender")
        kills.kill("engine")


@pytest.mark.drill
@pytest.mark.timeout(600)
@pytest.mark.parametrize("of", ["sender", "engine"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_twenty_kills_at_random_buckets(transport: str, of: str) -> None:
    with fleet(transport, f"{transport} {of}") as kills:
        assert kills.update()
        for _ in range(20):
            kills.kill(of)
        print(f"{transport}, {of}: {dict(kills.seen)}")
        assert kills.seen["kills"] == 20 and kills.seen["digests"] > 100
