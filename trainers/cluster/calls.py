"""Sends the driver's calls to its actors, and waits for the answers up to a time limit or while actors make progress.

    handle.begin(shard) -> Call ---+
    handle.begin(shard) -> Call ---+--> gather(calls, "plan", timeout_s) -> results, or the first ActorFailed

Messages are small, and their bytes are counted. Errors name the actor and the stage. The handles with the methods of
each kind of actor are in handles.py.

Progress queries distinguish slow actors from stuck ones. `gather_moving` waits for calls that can fail independently of
each other, and returns each one's outcome. `gather_slow` waits for calls of train workers, all of which must succeed,
and raises the first failure.
"""

from __future__ import annotations

import functools
import textwrap
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ...actors.engines.protocol import EngineDied
from ...actors.process.own_process import ActorInfo
from ...actors.process.remote_methods import decode_result, encode_arguments, submit
from ..supervision.own_clock import OwnClock

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

WAIT_S = 5.0
"""Longest single wait in seconds for answers. If this process is stopped, no more than this counts as waited."""
RESULT_TIMEOUT_S = 60.0
"""Seconds within which Ray must deliver a result that it has announced as ready."""


class ActorFailed(RuntimeError):
    """An actor died, raised an exception, or did not answer in time. The message names the actor, the stage and how
    long the call had been in flight."""

    def __init__(self, message: str, cause: BaseException | None = None, *, died: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        """The exception that the actor raised; None when it died or did not answer in time."""
        self.died = died or isinstance(cause, EngineDied)
        """True if the actor's process died, or the process of the engine that it hosts, without which the actor is
        useless."""


@dataclass(slots=True)
class DriverMeter:
    """Counts the bytes of all messages between the driver and its actors."""

    num_bytes: int = 0
    """Number of message bytes sent and received since the last `take`."""

    def take(self) -> int:
        """Return the number of message bytes since the last `take`, and restart the count at 0."""
        taken, self.num_bytes = self.num_bytes, 0
        return taken


@dataclass(frozen=True, slots=True, eq=False)
class Call(Generic[T_co]):
    """A method call that was sent to an actor; `gather` waits for its result."""

    actor: ActorHandle
    method: Callable[..., Any]
    """Unbound method that is called, such as `TrainWorker.begin`. It belongs to the class that the actor hosts."""
    message: bytes
    """The encoded arguments."""
    actors: Sequence[Any]
    """Ray handles of other actors, passed after the encoded arguments."""
    reference: ray.ObjectRef
    """Ray's reference to the encoded result."""
    started: float
    """`time.monotonic` time at which the call was sent."""
    pid: int
    """Id of the process that was called. Another process can have replaced it since."""

    def again(self, actor: ActorHandle) -> Call[T_co]:
        """Send the same call once more, to the present process of `actor`. `actor` is this call's actor or one of the
        same class."""
        return actor.send(self.method, self.message, self.actors)


class Cluster:
    """The Ray cluster, as far as calls in flight need it. `headrace.testing.FakeCluster` is a stand-in without
    processes."""

    def ready(self, references: list[Any], timeout_s: float) -> list[Any]:
        """Return the references of calls that have ended. Waits up to `timeout_s` for the first one."""
        done, _ = ray.wait(references, num_returns=1, timeout=timeout_s)
        if done:
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return done

    def result(self, reference: Any) -> bytes:
        """Return the encoded result of a call that has ended. Raises the call's RayError if it failed."""
        return cast(bytes, ray.get(reference, timeout=RESULT_TIMEOUT_S))

    def kill(self, ray_actor: Any) -> None:
        """Kill an actor's process, without waiting until it is gone."""
        ray.kill(ray_actor, no_restart=True)


RAY = Cluster()


class ActorHandle:
    """The driver's handle of one actor of the run. When the actor's process is replaced by another, the handle stays
    the same."""

    is_own = True
    """False if the actor's process belongs to other runs, too."""

    def __init__(self, start: Callable[[], Any], name: str, meter: DriverMeter, cluster: Cluster = RAY) -> None:
        """Start the actor's process without waiting for it. start: function that starts a process and returns Ray's
        handle of it."""
        self._start = start
        self._meter = meter
        self.cluster = cluster
        """Where the actor's process runs."""
        self.setup: Any = None
        """Settings from which the actor is made, which `configure` sends to its process; None until they are known."""
        self.built: Any = None
        """The answer of the last process to `build`; None until it has."""
        self.info = ActorInfo(name, 0, "not up yet")
        """Name, process id and host of the actor, as its process last reported them."""
        self.ray_actor = start()
        """Ray's own handle of the actor's current process."""
        self._kills: list[tuple[float, str]] = []
        """Time (`time.monotonic`) of each `kill`, and why."""

    def restart(self) -> None:
        """Start a new process for the actor, without waiting for it. The caller must then call `configure` and
        `build`."""
        self.ray_actor = self._start()

    def kill(self, why: str = "was ended by this run") -> None:
        """Kill the actor's process, even during a call. Does not wait until the process is gone.

        why: what the errors of its calls say after the actor's name, because Ray does not know the reason.
        """
        self._kills.append((time.monotonic(), why))
        self.cluster.kill(self.ray_actor)

    def run(self, function: Callable[Concatenate[Any, P], Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Make the actor's process run `function(actor, *args, **kwargs)` between two of its calls. Does not wait for
        it."""
        self.ray_actor.__ray_call__.remote(function, *args, **kwargs)

    def send(self, method: Callable[..., Any], message: bytes, actors: Sequence[Any] = ()) -> Call[Any]:
        """Send a call of `method` with the encoded arguments `message`. actors: Ray handles to pass after these
        arguments, see `remote_methods.submit`."""
        self._meter.num_bytes += len(message)
        reference = submit(self.ray_actor, method, message, actors)
        return Call(self, method, message, actors, reference, time.monotonic(), self.info.pid)

    def receive(self, call: Call[T], stage: str) -> T:
        """Return the result of a call that has ended. Raises ActorFailed if the actor died or raised an exception, or
        if its answer was lost."""
        elapsed = time.monotonic() - call.started
        try:
            reply = self.cluster.result(call.reference)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            message = f"{stage}: {self.info} failed after {elapsed:.1f} s: {type(cause).__name__}: {cause}"
            raise ActorFailed(message, cause) from error
        except RayActorError as error:
            in_flight = f"the call {call.method.__name__} was in flight for {elapsed:.1f} s"
            why = next((why for killed_s, why in self._kills if call.started <= killed_s), None)
            raise ActorFailed(
                f"{stage}: {self.info} died; {in_flight}: {death_in_words(str(error))}"
                if why is None
                else f"{stage}: {self.info} {why}; {in_flight}",
                died=True,
            ) from error
        except (GetTimeoutError, RayError) as error:
            raise ActorFailed(f"{stage}: the answer of {self.info} is lost: {type(error).__name__}: {error}") from error
        self._meter.num_bytes += len(reply)
        return decode_result(call.method, reply)


@overload
def calling(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ActorHandle, P], Call[T]]: ...
@overload
def calling(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[ActorHandle, P], Call[T]]: ...
def calling(method: Callable[..., Any]) -> Callable[..., Call[Any]]:
    """Return the method of a handle that calls `method` of the actor's host class without waiting for the result.

    All arguments are passed by position. The returned method raises TypeError for an argument that must not pass
    through the driver, such as a tensor.
    """

    @functools.wraps(method)
    def call(handle: ActorHandle, *args: Any) -> Call[Any]:
        return handle.send(method, encode_arguments(args))

    return call


def gather(
    calls: Sequence[Call[T]],
    stage: str,
    timeout_s: float,
    *,
    bound: str = "",
    on_result: Callable[[Call[T]], None] | None = None,
) -> list[T]:
    """Wait for all calls; returns their results in order. The first failure of any call ends the wait at once.

    bound: name of the config key that sets `timeout_s`, for the error message. on_result: callback for each call as it
    succeeds. Raises ActorFailed when an actor died, raised an exception (see its `cause`), or did not answer within
    `timeout_s`.
    """
    results = dict[Call[T], T]()
    for call, outcome in settled(calls, stage, timeout_s):
        if isinstance(outcome, ActorFailed):
            raise outcome
        results[call] = outcome
        if on_result is not None:
            on_result(call)
    late = [call.actor.info for call in calls if call not in results]
    if late:
        key = f" ({bound})" if bound else ""
        raise ActorFailed(f"{stage}: no answer within {timeout_s:g} s{key} from {', '.join(map(str, late))}")
    return [results[call] for call in calls]


def gather_each(calls: Sequence[Call[T]], stage: str, timeout_s: float) -> list[T | ActorFailed]:
    """Wait for all calls, at most `timeout_s`; returns, in order, each call's result or its ActorFailed."""
    results = dict[Call[T], T | ActorFailed](settled(calls, stage, timeout_s))
    for call in calls:
        if call not in results:
            results[call] = ActorFailed(f"{stage}: no answer within {timeout_s:g} s from {call.actor.info}")
    return [results[call] for call in calls]


def ended(calls: Sequence[Call[T]], stage: str, timeout_s: float) -> list[tuple[Call[T], T | ActorFailed]]:
    """Return the calls that have ended, each with its result or ActorFailed. Waits up to `timeout_s` for the first
    one."""
    by_reference = {call.reference: call for call in calls}
    if not by_reference:
        return []
    done = calls[0].actor.cluster.ready(list(by_reference), timeout_s)
    return [(by_reference[reference], _outcome(by_reference[reference], stage)) for reference in done]


def settled(calls: Sequence[Call[T]], stage: str, timeout_s: float) -> Iterator[tuple[Call[T], T | ActorFailed]]:
    """Yield each call with its result or ActorFailed as soon as it ends. Stops when all have ended or `timeout_s` has
    passed, without the time in which this process was stopped."""
    left_s, pending = timeout_s, list(calls)
    while pending:
        wait_s, began_s = min(WAIT_S, left_s), time.monotonic()
        found = ended(pending, stage, wait_s)
        left_s -= min(time.monotonic() - began_s, wait_s) if found else wait_s
        if not found and left_s <= 0.0:
            return
        yield from found
        done = dict(found)
        pending = [call for call in pending if call not in done]


def _outcome(call: Call[T], stage: str) -> T | ActorFailed:
    try:
        return call.actor.receive(call, stage)
    except ActorFailed as error:
        return error


_DEATHS = (
    ("memory monitor", "Ray ended it, because its host ran out of memory"),
    ("NODE_OUT_OF_MEMORY", "Ray ended it, because its host ran out of memory"),
    ("ray.kill", "it was ended on request"),
    ("its node has died", "its host is no longer part of the Ray cluster"),
    ("node was terminated", "its host is no longer part of the Ray cluster"),
    ("temporarily unavailable", "its host does not answer"),
    ("creation task", "it failed while it started"),
    ("SIGKILL", "its process was killed (SIGKILL, as the kernel does when memory runs out) or crashed"),
    ("connection error", "its process was killed (SIGKILL, as the kernel does when memory runs out) or crashed"),
)
"""Explanations of an actor's death: (text to look for in Ray's message, its meaning). The first text found counts."""


def death_in_words(account: str) -> str:
    """Summarize Ray's paragraph about an actor's death in one sentence."""
    for words, meaning in _DEATHS:
        if words in account:
            return meaning
    last = next((line.strip() for line in reversed(account.splitlines()) if line.strip()), "Ray does not say why")
    sentence = last.partition(". ")[0].rstrip(".")
    return textwrap.shorten(sentence, 200, placeholder=" ...")


ASK_EVERY_S = 1.0
"""Seconds between two progress queries to the same actor."""


class ProgressWatch:
    """Queries actors about their progress, and tracks how long each has been without progress. Each actor has at most
    one unanswered query."""

    def __init__(
        self,
        actors: Iterable[ActorHandle],
        ask: Callable[[Any], Call[int]] = lambda actor: actor.progress(),
        ask_every_s: float = ASK_EVERY_S,
    ) -> None:
        """Begin to watch `actors`. No actor is queried before the first `look`.

        ask: function that queries an actor for a number that changes whenever it makes progress. ask_every_s: seconds
        between two queries to the same actor.
        """
        self._clock = OwnClock()
        now = self._clock.now_s()
        self._ask = ask
        self._ask_every_s = ask_every_s
        self._asked = dict[ActorHandle, Call[int]]()
        """Unanswered queries: actor -> call."""
        self._figures = dict[ActorHandle, int]()
        self._moved_s = dict.fromkeys(actors, now)
        self._answered_s = dict.fromkeys(self._moved_s, now)
        self._next_s = dict.fromkeys(self._moved_s, now)
        """Actor -> time of the clock from which it may be queried again."""

    def look(self, only: Collection[ActorHandle] | None = None) -> tuple[bool, dict[ActorHandle, ActorFailed]]:
        """Collect the answers that have arrived and send new queries, without waiting for their answers.

        only: actors to query again; None queries all watched actors. Returns whether any actor has made progress, and
        the queries that failed: actor -> failure.
        """
        moved, failed = False, dict[ActorHandle, ActorFailed]()
        by_call = {call: actor for actor, call in self._asked.items()}
        now = self._clock.now_s()
        for call, answer in ended(list(by_call), "progress", 0.0):
            actor = by_call[call]
            del self._asked[actor]
            if isinstance(answer, ActorFailed):
                failed[actor] = answer
                continue
            self._answered_s[actor] = now
            if actor not in self._figures or answer != self._figures[actor]:
                moved |= actor in self._figures
                self._figures[actor] = answer
                self._moved_s[actor] = now
        for actor, next_s in self._next_s.items():
            if actor not in self._asked and now >= next_s and (only is None or actor in only):
                self._asked[actor] = self._ask(actor)
                self._next_s[actor] = now + self._ask_every_s
        return moved, failed

    def still_s(self, actor: ActorHandle) -> float:
        """Return for how many seconds `actor` has made no progress; 0.0 for an actor that is not watched."""
        return self._since(self._moved_s, actor)

    def silent_s(self, actor: ActorHandle) -> float:
        """Return the seconds since `actor` last answered a query; 0.0 for an actor that is not watched."""
        return self._since(self._answered_s, actor)

    def _since(self, times: dict[ActorHandle, float], actor: ActorHandle) -> float:
        return self._clock.now_s() - times[actor] if actor in times else 0.0


def gather_moving(
    calls: Sequence[Call[T]], stage: str, timeout_s: float, ask: Callable[[Any], Call[int]]
) -> list[T | ActorFailed]:
    """Wait for all calls; returns, in order, each call's result or its ActorFailed.

    The wait has no time limit while any of the actors that have not answered makes progress. It ends after `timeout_s`
    seconds without progress of any of them. ask: function that queries an actor for a number that changes whenever it
    makes progress.
    """
    results: dict[Call[T], T | ActorFailed] = {}
    clock, look_s, moved_s = OwnClock(), min(ASK_EVERY_S, timeout_s / 4), 0.0
    watch = ProgressWatch([call.actor for call in calls], ask, look_s)
    while pending := [call for call in calls if call not in results]:
        left_s = moved_s + timeout_s - clock.now_s()
        if left_s <= 0.0:
            break
        results.update(ended(pending, stage, min(look_s, left_s)))
        # A failed query is ignored here, because the actor's pending call reports the failure.
        moved, _ = watch.look([call.actor for call in pending if call not in results])
        if moved:
            moved_s = clock.now_s()
    late = f"{stage}: no answer and no progress within {timeout_s:g} s from"
    return [results[call] if call in results else ActorFailed(f"{late} {call.actor.info}") for call in calls]


def gather_slow(
    calls: Sequence[Call[T]],
    workers: Sequence[ActorHandle],
    stage: str,
    *,
    silence_s: float,
    stall_s: float,
    num_bytes: Callable[[], int] = lambda: 0,
    on_look: Callable[[], None] = lambda: None,
) -> list[T]:
    """Wait for calls of train workers that may take hours, and return their results in order. The wait has no time
    limit while the workers make progress; the first failure of any call ends it at once.

    silence_s: seconds for which a worker may leave a progress query unanswered. stall_s: seconds within which either
    the progress number of some worker or the result of `num_bytes`, the number of bytes written so far, must change.
    on_look: callback after each check without a stuck worker, about once per second.

    Raises ActorFailed if a worker died, raised an exception (see its `cause`), or makes no progress.
    """
    watch, clock = ProgressWatch(workers), OwnClock()
    results = dict[Call[T], T]()
    written, moved_s = num_bytes(), 0.0
    while pending := [call for call in calls if call not in results]:
        for call, outcome in ended(pending, stage, ASK_EVERY_S):
            if isinstance(outcome, ActorFailed):
                raise outcome
            results[call] = outcome
        moved, _ = watch.look()
        now = clock.now_s()
        if moved or num_bytes() != written:
            written, moved_s = num_bytes(), now
        silent = [worker for worker in workers if watch.silent_s(worker) >= silence_s]
        if silent and len(results) < len(calls):
            names = ", ".join(str(worker.info) for worker in silent)
            raise ActorFailed(f"{stage}: no answer to progress queries within {silence_s:g} s from {names}")
        if now - moved_s >= stall_s:
            late = ", ".join(str(call.actor.info) for call in pending if call not in results)
            raise ActorFailed(f"{stage}: {late} wrote and computed nothing for {stall_s:g} s")
        on_look()
    return [results[call] for call in calls]
