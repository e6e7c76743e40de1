"""Shared by the transports' tests: weights, a plain publisher, and processes that receive or send."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from headrace.actors.transports.factory import build_sender
from headrace.actors.transports.protocol import (
    BucketFrame,
    ReceiverGroup,
    WeightSender,
    WeightTransferError,
    WeightUpdate,
)
from headrace.actors.transports.settings import ReceiverConfig, SenderConfig, Staging
from headrace.actors.transports.staging import WeightInbox
from headrace.codecs.bucket_delta import encode_sparse
from headrace.codecs.buckets import BucketPlan, checksum, plan_buckets, write_piece

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["headrace.actors.transports.staging", "headrace.codecs.bucket_delta"])
GRACE_S = 2.5
"""Beyond its bound that a call may take on a machine with other things to do."""
START_S = 60.0

Named = dict[str, torch.Tensor]


def weights(seed: int, rows: int = 50) -> Named:
    """Odd tensors: strided, empty, a scalar, dtypes of 1, 2, 4 and 8 bytes. rows: 50 makes 3 KiB."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(rows, 8, generator=generator),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "strided": torch.randn(6, 10, generator=generator, requires_grad=True).t(),
        "empty": torch.zeros(0, 4),
        "count": torch.arange(7) + seed,
        "scalar": torch.tensor(float(seed)),
        "byte": torch.full((1,), seed % 256, dtype=torch.uint8),
        "head": torch.randn(rows, 8, generator=generator),
    }


def plan_of(named: Mapping[str, torch.Tensor], bucket_bytes: int) -> BucketPlan:
    return plan_buckets({name: (t.dtype, tuple(t.shape)) for name, t in named.items()}, bucket_bytes)


def bucket_bytes_of(plan: BucketPlan, bucket: int, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    out = torch.zeros(plan.sizes[bucket], dtype=torch.uint8)
    for entry in plan.in_bucket(bucket):
        write_piece(entry, named[entry.name], out)
    return out


def payloads(
    plan: BucketPlan, named: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor] | None
) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
    """Frame and payload of each bucket, against `base` when there is one."""
    for bucket in range(len(plan.sizes)):
        payload, encoding = bucket_bytes_of(plan, bucket, named), "whole"
        if base is not None:
            old = bucket_bytes_of(plan, bucket, base)
            if torch.equal(payload, old):
                payload, encoding = payload[:0], "same"
            else:
                sparse = encode_sparse(payload.numpy(), old.numpy(), 1)
                if sparse is not None:
                    payload, encoding = torch.from_numpy(sparse), "sparse"
        yield BucketFrame(bucket, encoding, len(payload), checksum(payload) if len(payload) else 0), payload


def publish(
    sender: WeightSender,
    plan: BucketPlan,
    named: Mapping[str, torch.Tensor],
    base: Mapping[str, torch.Tensor] | None = None,
    *,
    tamper: Callable[[int, torch.Tensor], None] | None = None,
    pause_s: float = 0.0,
) -> list[str]:
    """Send the open update. tamper(bucket, buffer): after the checksum was taken. Returns the encodings used."""
    used = []
    for frame, payload in payloads(plan, named, base):
        if frame.nbytes:
            buffer = sender.buffer(frame.bucket, frame.nbytes)
            buffer.copy_(payload)
            if tamper is not None:
                tamper(frame.bucket, buffer)
        sender.send(frame)
        used.append(frame.encoding)
        if pause_s:
            time.sleep(pause_s)  # the gather of the next bucket
    sender.finish()
    return used


def equal(got: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> bool:
    return list(got) == list(sent) and all(
        got[name].dtype == t.dtype and got[name].shape == t.shape and torch.equal(got[name], t.detach())
        for name, t in sent.items()
    )


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
        self._pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(theirs, host, args), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def answer(self, timeout_s: float = START_S) -> Answer:
        """Raises EOFError when the process is dead, and fails when it does not answer."""
        if not self._pipe.poll(timeout_s):
            pytest.fail(f"process {self.pid}: no answer within {timeout_s} s")
        return self._pipe.recv()

    def call(self, method: str, *args: Any) -> Answer:
        self.start(method, *args)
        return self.answer()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def ask_to_end(self) -> None:
        if self.process.is_alive():
            os.kill(self.pid, signal.SIGCONT)
            with contextlib.suppress(OSError):
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
        self._inbox = WeightInbox(config, worker)

    def prepare(self, update: WeightUpdate, damage: int | None = None) -> None:
        """damage: a bucket of which a byte is flipped in this process."""
        if damage is None:
            self._inbox.prepare(update)
            return
        from headrace.actors.transports import receiving

        original, count = receiving.checksum, iter(range(1 << 30))

        def damaged(payload: torch.Tensor) -> int:
            return original(payload) ^ (1 if next(count) == damage else 0)

        receiving.checksum = damaged
        try:
            self._inbox.prepare(update)
        finally:
            receiving.checksum = original

    def arrive(self, update: WeightUpdate, seed: int, rows: int) -> bool:
        """Without staging: whether the tensors that came are those of `weights(seed, rows)`."""
        self._inbox.prepare(update)
        assert self._inbox.staged is None
        got = {}
        for tensors in self._inbox.arriving(update):
            got |= {name: tensor.clone() for name, tensor in tensors}
        sent = weights(seed, rows)
        return equal({name: got[name] for name in sent}, sent) and len(got) == len(sent)

    def holds(self, seed: int, rows: int) -> bool:
        staged = self._inbox.staged
        return staged is not None and equal(staged.named, weights(seed, rows))

    def holds_changed(self, seed: int, times: int) -> bool:
        """Whether what is staged is `weights(seed)` with one element raised so many times."""
        expected = weights(seed)
        expected["count"][3] += times
        staged = self._inbox.staged
        return staged is not None and equal(staged.named, expected)

    def choose(self, staging: Staging) -> None:
        self._inbox.close()
        self._inbox = WeightInbox(replace(self._config, staging=staging), self._worker)

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


class Crew:
    """A sender in this process and two engines of two workers each in others."""

    def __init__(self, kind: str, sender: SenderConfig, receiver: ReceiverConfig) -> None:
        self.kind = kind
        self.config = sender
        self._receiver = receiver
        self.sender = build_sender(kind, sender)
        self.groups = (ReceiverGroup("engine-0", 2), ReceiverGroup("engine-1", 2))
        self.workers: dict[tuple[str, int], PeerProcess] = {}
        for group in self.groups:
            for worker in range(group.num_workers):
                self.start_worker(group.engine, worker)

    def start_worker(self, engine: str, worker: int) -> PeerProcess:
        config = ReceiverConfig(engine, self._receiver.staging, "cpu", self._receiver.data_plane)
        self.workers[engine, worker] = PeerProcess(ReceiverHost, config, worker)
        return self.workers[engine, worker]

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
                peer.ask_to_end()
            for peer in self.workers.values():
                peer.end()


def outcome(call: Callable[[], Any]) -> Answer:
    """What a call in this process comes to."""
    started = time.monotonic()
    value, error = None, ""
    try:
        value = call()
    except WeightTransferError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Answer(value, error, time.monotonic() - started)
