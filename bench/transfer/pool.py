"""The benchmark's processes: a producer, consumers and one that serves, as Ray actors or (for tests) as threads."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

from .baselines.served import Server
from .baselines.transferqueue import PROCESS_ENV
from .process import Hand

CALL_TIMEOUT_S = 120.0
"""Bound of every call: what a contender's own call does within it is measured, what it does not is a failure."""
START_TIMEOUT_S = 180.0
SERVE_TIMEOUT_S = 30.0

PRODUCER = "producer"
SERVING = "serving"


def consumer(number: int) -> str:
    """The name of consumer `number`."""
    return f"consumer{number}"


class HandLost(RuntimeError):
    """A process died or did not answer within its bound: the crew must `restart`."""


class Crew(Protocol):
    """Named hands. Calls to one hand come one after another, in the order they were started."""

    names: tuple[str, ...]
    lead_s: float
    """How far ahead hands are told to start together: longer than it takes to tell them."""

    def start(self, hand: str, method: str, *args: Any) -> Any:
        """Begin `method` of a hand; give what this returns to `gather`."""
        ...

    def gather(self, calls: Sequence[Any], timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """The results in order. Raises what a hand raised, or HandLost."""
        ...

    def restart(self) -> None:
        """End all hands, whatever they do, and begin with new ones."""
        ...

    def close(self) -> None:
        """End all hands. Idempotent."""
        ...


def call(crew: Crew, hand: str, method: str, *args: Any) -> Any:
    """Start and gather one call."""
    return crew.gather([crew.start(hand, method, *args)])[0]


def hand_names(num_consumers: int) -> tuple[str, ...]:
    """All hands of a crew."""
    return (PRODUCER, SERVING, *[consumer(number) for number in range(num_consumers)])


class RayCrew:
    """Each hand in a Ray actor's process. Ray must be initialised."""

    lead_s = 0.05

    def __init__(self, num_consumers: int) -> None:
        self.names = hand_names(num_consumers)
        self._actors: dict[str, Any] = {}
        self._begin(self.names)

    def start(self, hand: str, method: str, *args: Any) -> ray.ObjectRef:
        return getattr(self._actors[hand], method).remote(*args)

    def gather(self, calls: Sequence[ray.ObjectRef], timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        try:
            return ray.get(list(calls), timeout=timeout_s)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except GetTimeoutError:
            raise HandLost(f"no answer within {timeout_s:g} s") from None
        except (RayActorError, OutOfMemoryError) as error:
            raise HandLost(f"a benchmark process died: {error}") from None

    def restart(self) -> None:
        """The serving hand goes on: its servers hang on nobody."""
        names = [name for name in self.names if name != SERVING]
        self._end(names)
        self._begin(names)

    def close(self) -> None:
        self._end(list(self._actors))

    def _begin(self, names: Sequence[str]) -> None:
        actor_class = ray.remote(num_cpus=0, runtime_env={"env_vars": PROCESS_ENV})(Hand)
        self._actors |= {name: actor_class.remote() for name in names}
        ready = [self._actors[name].leave.remote() for name in names]
        ray.get(ready, timeout=START_TIMEOUT_S)

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            actor = self._actors.pop(name, None)
            if actor is not None and ray.is_initialized():
                ray.kill(actor)


class ThreadCrew:
    """Each hand in a thread of this process, for in-process data planes."""

    lead_s = 0.005

    def __init__(self, num_consumers: int) -> None:
        self.names = hand_names(num_consumers)
        self._hands = {name: Hand() for name in self.names}
        self._pools = {name: ThreadPoolExecutor(1, f"bench-{name}") for name in self.names}

    def start(self, hand: str, method: str, *args: Any) -> concurrent.futures.Future[Any]:
        return self._pools[hand].submit(getattr(self._hands[hand], method), *args)

    def gather(self, calls: Sequence[concurrent.futures.Future[Any]], timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        try:
            return [future.result(timeout_s) for future in calls]
        except concurrent.futures.TimeoutError:
            raise HandLost(f"no answer within {timeout_s:g} s") from None

    def restart(self) -> None:
        for name in self.names:
            self._pools[name].shutdown(wait=False, cancel_futures=True)
            self._hands[name] = Hand()
            self._pools[name] = ThreadPoolExecutor(1, f"bench-{name}")

    def close(self) -> None:
        for name in self.names:
            self._pools[name].submit(self._hands[name].leave).result(CALL_TIMEOUT_S)
            self._pools[name].shutdown()


class CrewHost:
    """Puts servers into the crew's serving hand."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def serve(self, name: str, start: Callable[[], Server]) -> tuple[str, int]:
        return self._crew.gather([self._crew.start(SERVING, "serve", name, start)], SERVE_TIMEOUT_S)[0]

    def stop(self, name: str) -> None:
        self._crew.gather([self._crew.start(SERVING, "stop", name)], SERVE_TIMEOUT_S)
