"""The driver's view of its actors: calls that carry metadata only, every byte counted, every failure with a name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ...actors.protocols import ActorInfo
from ...codecs import messages


class PeerFailed(RuntimeError):
    """An actor died, failed or was late: says who, where, in which stage, after how long."""

    def __init__(self, message: str, cause: BaseException | None = None, *, died: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        """What the actor raised; None when it died or was late."""
        self.died = died
        """Whether its process is gone."""


@dataclass(slots=True)
class DriverMeter:
    """Bytes that went through the driver to and from its actors since the last `take`."""

    num_bytes: int = 0

    def take(self) -> int:
        """The count so far, and start again at 0."""
        taken, self.num_bytes = self.num_bytes, 0
        return taken


@dataclass(frozen=True, slots=True)
class Call:
    """One call on its way."""

    peer: Peer
    method: str
    ref: ray.ObjectRef
    started: float
    args: tuple[Any, ...]
    pid: int
    """Of the process that was asked: another may have taken the peer's place since."""


class Peer:
    """One actor. Arguments and results are plain data or dataclasses of numbers and metadata columns, never tensors:
    what the message codec refuses does not pass."""

    def __init__(self, handle: Any, info: ActorInfo, meter: DriverMeter) -> None:
        self.handle = handle
        self.info = info
        self.meter = meter

    def call(self, method: str, *args: Any) -> Call:
        """Start `method`; collect the result with `gather`."""
        self.meter.num_bytes += sum(message_bytes(arg) for arg in args)
        return Call(self, method, getattr(self.handle, method).remote(*args), time.monotonic(), args, self.info.pid)


def message_bytes(value: Any) -> int:
    """Bytes of a message. Raises TypeError when it holds a tensor."""
    return len(value) if isinstance(value, bytes) else len(messages.encode(value))


def gather(calls: Sequence[Call], stage: str, timeout_s: float) -> list[Any]:
    """All results in the order of `calls`. The first failure ends the wait at once, whichever peer it comes from.

    Raises PeerFailed when a peer died, raised (its `cause`), or did not answer within `timeout_s`.
    """
    return _settle(calls, stage, timeout_s, raising=True)


def gather_each(calls: Sequence[Call], stage: str, timeout_s: float) -> list[Any | PeerFailed]:
    """Like `gather`, but waits for every peer: where one failed stands its PeerFailed instead of a result."""
    return _settle(calls, stage, timeout_s, raising=False)


def ended(calls: Sequence[Call], stage: str, timeout_s: float) -> list[tuple[Call, Any | PeerFailed]]:
    """The calls that have ended, each with its result or PeerFailed; waits `timeout_s` for the first, 0: not at all."""
    of_ref = {call.ref: call for call in calls}
    if not of_ref:
        return []
    done, _ = ray.wait(list(of_ref), num_returns=1, timeout=timeout_s)
    if done:
        done, _ = ray.wait(list(of_ref), num_returns=len(of_ref), timeout=0)
    found: list[tuple[Call, Any | PeerFailed]] = []
    for ref in done:
        try:
            found.append((of_ref[ref], _result(of_ref[ref], stage)))
        except PeerFailed as error:
            found.append((of_ref[ref], error))
    return found


def _settle(calls: Sequence[Call], stage: str, timeout_s: float, *, raising: bool) -> list[Any]:
    start = time.monotonic()
    of_ref = {call.ref: call for call in calls}
    pending, results = list(of_ref), {}
    while pending:
        left = timeout_s - (time.monotonic() - start)
        done, pending = ray.wait(pending, num_returns=1, timeout=max(left, 0.0))
        if not done:
            late = {ref: of_ref[ref].peer.info for ref in pending}
            if raising:
                raise PeerFailed(f"{stage}: no answer within {timeout_s:g} s from {', '.join(map(str, late.values()))}")
            results |= {
                ref: PeerFailed(f"{stage}: no answer within {timeout_s:g} s from {info}") for ref, info in late.items()
            }
            break
        for ref in done:
            try:
                results[ref] = _result(of_ref[ref], stage)
            except PeerFailed as error:
                if raising:
                    raise
                results[ref] = error
    return [results[call.ref] for call in calls]


def _result(call: Call, stage: str) -> Any:
    peer = call.peer
    elapsed = time.monotonic() - call.started
    try:
        value = ray.get(call.ref, timeout=60.0)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        message = f"{stage}: {peer.info} failed after {elapsed:.1f} s: {type(cause).__name__}: {cause}"
        raise PeerFailed(message, cause) from error
    except RayActorError as error:
        raise PeerFailed(
            f"{stage}: {peer.info} died; the call {call.method} was under way for {elapsed:.1f} s. {_reason(error)}",
            died=True,
        ) from error
    except (GetTimeoutError, RayError) as error:
        raise PeerFailed(f"{stage}: the answer of {peer.info} is lost: {type(error).__name__}: {error}") from error
    peer.meter.num_bytes += message_bytes(value)
    return value


def _reason(error: RayActorError) -> str:
    """Ray's own words on a death, its first useful lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[-2:])[:400]
