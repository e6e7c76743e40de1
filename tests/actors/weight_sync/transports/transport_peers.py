"""Processes that send or receive weights for the transports' tests, and groups of them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import pytest
import torch

from headrace.actors.weight_sync.config import Staging, SyncConfig
from headrace.actors.weight_sync.inbox import WeightInbox
from headrace.actors.weight_sync.transports import collective_receiver
from headrace.actors.weight_sync.transports.factory import build_sender
from headrace.actors.weight_sync.transports.host_ring import HostRing, host_name
from headrace.actors.weight_sync.transports.protocol import (
    ReceiverConfig,
    ReceiverGroup,
    SenderConfig,
    WeightTransferError,
    WeightUpdate,
)
from headrace.tests.actors.weight_sync.transports.sample_weights import equal, plan_of, publish, weights
from headrace.tests.process_pool import FORKSERVER

GRACE_S = 2.5
"""Beyond its bound that a call may take on a machine with other things to do."""
START_S = 60.0


# ---------------------------------------------------------------- processes


@dataclass(frozen=True)
class Answer:
    """What a call in another process came to."""

    value: Any
    error: str
    """`Class: text`; "" when it went well."""
    seconds: float

    def expect(self) -> Any:
        assert not self.error, self.error
        return self.value


class PeerProcess:
    """A process that serves calls of `host`'s methods, one after another."""

    def __init__(self, host: Callable[..., Any], *args: Any) -> None:
        self._pipe, theirs = FORKSERVER.Pipe()
        self.process = FORKSERVER.Process(target=_serve, args=(theirs, host, args), daemon=True)
        self.process.start()
        theirs.close()
        self._calls = 0

    @property
    def is_free(self) -> bool:
        """Alive, and all its answers were taken."""
        return not self._pipe.closed and self.process.is_alive() and not self._calls

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, method: str, *args: Any) -> None:
        self._calls += 1
        self._pipe.send((method, args))

    def answer(self, timeout_s: float = START_S) -> Answer:
        """Raises EOFError when the process is dead, and fails when it does not answer."""
        if not self._pipe.poll(timeout_s):
            pytest.fail(f"process {self.pid}: no answer within {timeout_s} s")
        self._calls -= 1
        return self._pipe.recv()

    def call(self, method: str, *args: Any) -> Answer:
        self.start(method, *args)
        return self.answer()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def ask_to_end(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(OSError):  # it may have died and not yet be known as dead
                os.kill(self.pid, signal.SIGCONT)
                self.start("close")

    def end(self) -> None:
        """Idempotent."""
        if self._pipe.closed:
            return
        self.ask_to_end()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self._pipe.close()


def _serve(pipe: Connection, host: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    served = host(*args)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:  # the test has ended
            return
        started = time.monotonic()
        value, error = None, ""
        try:
            value = getattr(served, method)(*arguments)
        except Exception as raised:  # told to the test
            error = f"{type(raised).__name__}: {raised}"
        pipe.send(Answer(value, error, time.monotonic() - started))
        if method == "close":
            return


class ReceiverHost:
    """An engine's worker."""

    def __init__(self, config: ReceiverConfig, worker: int) -> None:
        self._config = config
        self._worker = worker
        # For `collective`, workers of one number are on one host, whose first receiver is in the first engine.
        collective_receiver.host_name = lambda: f"{host_name()} {self._worker}"
        self._inbox = WeightInbox(config, worker)

    def prepare(self, update: WeightUpdate, damage: int | None = None) -> None:
        """damage: a bucket of which a byte is flipped in this process."""
        if damage is None:
            self._inbox.prepare(update)
            return
        from headrace.actors.weight_sync.transports import ends

        original, count = ends.checksum, iter(range(1 << 30))

        def damaged(payload: torch.Tensor) -> int:
            return original(payload) ^ (1 if next(count) == damage else 0)

        ends.checksum = damaged
        try:
            self._inbox.prepare(update)
        finally:
            ends.checksum = original

    def arrive(self, update: WeightUpdate, seed: int, rows: int, *, ahead: bool = False) -> bool:
        """Without staging: whether the tensors that came are those of `weights(seed, rows)`. ahead: receive what comes
        first before asking for it."""
        self._inbox.prepare(update)
        assert self._inbox.staged is None
        if ahead:
            self._inbox.read_ahead()
        got = {}
        sent = weights(seed, rows)
        places = {
            name: torch.zeros(one.shape, dtype=one.dtype, device=self._config.device)
            for name, one in [*sent.items()][::2]
        }
        for tensors in self._inbox.arriving(update, places):
            for name, tensor in tensors:
                got[name] = tensor.clone()
                if self._config.device != "cpu" and name in places and tensor is not places[name]:
                    return False
        return equal({name: got[name] for name in sent}, sent) and len(got) == len(sent)

    def arrive_ahead(self, update: WeightUpdate, seed: int, rows: int) -> bool:
        return self.arrive(update, seed, rows, ahead=True)

    def holds(self, seed: int, rows: int) -> bool:
        staged = self._inbox.staged
        return staged is not None and equal(staged.named, weights(seed, rows))

    def staged(self) -> dict[str, torch.Tensor]:
        """Return what is staged, copied out of the transport's memory."""
        staged = self._inbox.staged
        return {} if staged is None else {name: one.clone() for name, one in staged.named.items()}

    def holds_changed(self, seed: int, times: int) -> bool:
        """Whether what is staged is `weights(seed)` with one element raised so many times."""
        expected = weights(seed)
        expected["count"][3] += times
        staged = self._inbox.staged
        return staged is not None and equal(staged.named, expected)

    def become(self, config: ReceiverConfig, worker: int) -> None:
        """Another worker, without the pains of birth."""
        self._inbox.close()
        self._config, self._worker = config, worker
        self._inbox = WeightInbox(config, worker)

    def forbid_rings(self) -> None:
        """From now on, this process cannot open the memory of another, as under another user."""

        def forbidden(location: str) -> NoReturn:
            raise PermissionError(13, "Permission denied", location)

        HostRing.open = forbidden

    def choose(self, staging: Staging) -> None:
        sync = self._config.sync.model_copy(update={"staging": staging})
        self.become(replace(self._config, sync=sync), self._worker)

    def prepare_and_drop(self, update: WeightUpdate, after_s: float) -> None:
        """drop: by another thread, while it is received."""
        timer = threading.Timer(after_s, self._inbox.drop, (update.version,))
        timer.start()
        try:
            self._inbox.prepare(update)
        finally:
            timer.join()

    def commit(self, version: int) -> None:
        self._inbox.committed(version)

    def drop(self, version: int) -> None:
        self._inbox.drop(version)

    def close(self) -> None:
        self._inbox.close()


class SenderHost:
    """A trainer's leader."""

    def __init__(self, kind: str, config: SenderConfig) -> None:
        self._sender = build_sender(kind, config)

    def begin(self, version: int, bucket_bytes: int, rows: int, receivers: Sequence[ReceiverGroup]) -> WeightUpdate:
        self._plan = plan_of(weights(version, rows), bucket_bytes)
        return self._sender.begin(version, self._plan, receivers)

    def publish(self, version: int, rows: int, pause_s: float) -> None:
        publish(self._sender, self._plan, weights(version, rows), pause_s=pause_s)

    def close(self) -> None:
        self._sender.close()


class PeerGroup:
    """A sender in this process and two engines of two workers each in others."""

    def __init__(
        self,
        kind: str,
        sender: SenderConfig,
        receiver: ReceiverConfig,
        devices: Mapping[tuple[str, int], str] | None = None,
    ) -> None:
        """devices: of workers that have one of their own."""
        self._devices = devices or {}
        self.kind = kind
        self.config = sender
        self._receiver = receiver
        self.sender = build_sender(kind, sender)
        sizes = {engine: 2 for engine in ("engine-0", "engine-1")} if devices is None else {}
        for engine, worker in self._devices:
            sizes[engine] = max(sizes.get(engine, 0), worker + 1)
        self.groups = tuple(ReceiverGroup(engine, size) for engine, size in sizes.items())
        self.workers: dict[tuple[str, int], PeerProcess] = {}
        for group in self.groups:
            for worker in range(group.num_workers):
                self.start_worker(group.engine, worker)

    def start_worker(self, engine: str, worker: int) -> PeerProcess:
        device = self._devices.get((engine, worker), self._receiver.device)
        config = replace(self._receiver, engine=engine, device=device)
        old = self.workers.get((engine, worker))
        if old is not None:
            _rest(old)
        if _RESTING:
            peer = _RESTING.pop()
            peer.call("become", config, worker).expect()
        else:
            peer = PeerProcess(ReceiverHost, config, worker)
        self.workers[engine, worker] = peer
        return peer

    def of(self, groups: Sequence[ReceiverGroup]) -> list[PeerProcess]:
        return [self.workers[group.engine, worker] for group in groups for worker in range(group.num_workers)]

    def update(
        self,
        version: int,
        bucket_bytes: int,
        *,
        groups: Sequence[ReceiverGroup] | None = None,
        rows: int = 50,
        base: int | None = None,
    ) -> list[str]:
        """A whole update that must succeed, committed in all of `groups`. Returns the encodings used."""
        groups = self.groups if groups is None else groups
        named = weights(version, rows)
        old = None if base is None else weights(base, rows)
        plan = plan_of(named, bucket_bytes)
        update = self.sender.begin(version, plan, groups, base)
        for peer in self.of(groups):
            peer.start("prepare", update)
        used = publish(self.sender, plan, named, old)
        for peer in self.of(groups):
            peer.answer().expect()
        self.commit(version, groups, rows)
        return used

    def commit(self, version: int, groups: Sequence[ReceiverGroup] | None = None, rows: int = 50) -> None:
        for peer in self.of(self.groups if groups is None else groups):
            assert peer.call("holds", version, rows).expect()
            peer.call("commit", version).expect()

    def close(self) -> None:
        try:
            self.sender.close()
        finally:
            for peer in self.workers.values():
                _rest(peer)


_RESTING: list[PeerProcess] = []
"""Workers of groups that are closed: a process takes a second to start."""


def _rest(peer: PeerProcess) -> None:
    if peer.is_free and not peer.call("become", ReceiverConfig("nobody", SyncConfig(delta=True)), 0).error:
        _RESTING.append(peer)
    else:
        peer.end()


def end_resting() -> None:
    """At the end of all tests."""
    for peer in _RESTING:
        peer.ask_to_end()
    while _RESTING:
        _RESTING.pop().end()


def outcome(call: Callable[[], Any]) -> Answer:
    """What a call in this process comes to."""
    started = time.monotonic()
    value, error = None, ""
    try:
        value = call()
    except WeightTransferError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Answer(value, error, time.monotonic() - started)
