"""A cluster without processes. The driver's real handles call a function of the test or an object in this process.

    cluster = FakeCluster()
    worker = cluster.trainer(lambda method: PENDING if method == "save" else None)
    gather([worker.abort()], "abort", 1.0)          # [None]
    gather([worker.save("/a")], "save", 1.0)        # raises ActorFailed: no answer within 1 s from train worker 0

    with FakeCluster() as cluster:
        engine = cluster.engine(ScriptedEngine(random_tokens(100)))
        gather([engine.version()], "look", 1.0)     # [0]

Messages are encoded and decoded as between processes. A call's answer can be an exception. An exception of Ray, such as
the `RayActorError` of a dead process, is raised unchanged. Any other is raised as if the actor had raised it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError

from ..actors.engine_actor import EngineHost
from ..actors.engines.protocol import ServingEngine
from ..actors.process.remote_methods import decode_arguments
from ..actors.train.actor import TrainActor
from ..actors.train.worker import TrainWorker
from ..codecs import messages
from ..trainers.cluster.calls import Cluster, DriverMeter
from ..trainers.cluster.handles import EngineHandle, RolloutHandle, TrainHandle

T = TypeVar("T")

PENDING = object()
"""Answer of a call that has not ended."""
Answer = Callable[[str], Any]
"""Type of a function from a method's name to its result, PENDING, or an exception. It is called each time that the
driver looks at the call."""


class Sent(NamedTuple):
    """A call as it reached an actor."""

    method: str
    message: bytes
    """Encoded arguments (see `decode_arguments`)."""
    actors: tuple[Any, ...]
    """Handles of other actors that were passed after the encoded arguments."""
    group: str
    """Concurrency group of the method; `main` if the method has none."""


class Reply(Protocol):
    """The driver's handle of a running call."""

    def done(self) -> bool:
        """Return whether the call has ended."""
        ...

    def result(self) -> bytes:
        """Return the encoded result. Raises the error of a call that failed."""
        ...


class FakeActor:
    """Stands for the process of an actor. A function answers each call."""

    def __init__(self, answer: Answer | None = None) -> None:
        """answer: function that answers calls; None for a subclass that starts its calls itself."""
        self.alive = True
        self.sent: list[Sent] = []
        """All calls that arrived, in order of arrival."""
        self.call = self.options("main")
        """The only method of an actor that handles call."""
        self._answer = answer

    def options(self, concurrency_group: str) -> Any:
        """Return the method `call` of a concurrency group."""

        def remote(method: str, message: bytes, *actors: Any) -> Reply:
            self.sent.append(sent := Sent(method, message, actors, concurrency_group))
            return self.start(sent)

        return SimpleNamespace(remote=remote, options=self.options)

    def start(self, sent: Sent) -> Reply:
        """Begin a call."""
        return _Asked(self, sent.method)

    def answer(self, method: str) -> Any:
        """Return the present answer to a call of `method`."""
        assert self._answer is not None
        return self._answer(method) if self.alive else RayActorError()

    def kill(self) -> None:
        """End the process. Running and later calls fail with RayActorError."""
        self.alive = False


class _Asked:
    """A call that gets its answer at each look of the driver."""

    def __init__(self, actor: FakeActor, method: str) -> None:
        self._actor, self._method = actor, method

    def done(self) -> bool:
        return self._actor.answer(self._method) is not PENDING

    def result(self) -> bytes:
        answer = self._actor.answer(self._method)
        if isinstance(answer, BaseException):
            raise answer
        return messages.encode(answer)


class _Hosting(FakeActor):
    """A process that runs calls in the background. After it was killed, it answers no call."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[Future[bytes]] = set()

    def start(self, sent: Sent) -> Future[bytes]:
        future: Future[bytes] = Future()
        if not self.alive:
            future.set_exception(RayActorError())
            return future
        future = self.run(sent)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def run(self, sent: Sent) -> Future[bytes]:
        raise NotImplementedError

    def kill(self) -> None:
        super().kill()
        for future in list(self._open):
            future.cancel()


class HostedEngine(_Hosting, EngineHost):
    """Process with an engine. It is an `EngineHost`, as engine actors are, and its calls run in an event loop."""

    def __init__(self, name: str, engine: ServingEngine, loop: asyncio.AbstractEventLoop) -> None:
        _Hosting.__init__(self)
        self._name, self._hosted, self._loop = name, engine, loop

    def _build(self) -> ServingEngine:
        assert self._hosted is not None
        return self._hosted

    def run(self, sent: Sent) -> Future[bytes]:
        return asyncio.run_coroutine_threadsafe(
            EngineHost.call(self, sent.method, sent.message, *sent.actors), self._loop
        )


class HostedTrainer(_Hosting):
    """Process of a train rank with an object that has the called methods of `TrainWorker`. Each concurrency group has
    its own thread."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._worker = worker
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def run(self, sent: Sent) -> Future[bytes]:
        method = getattr(TrainWorker, sent.method, None) or getattr(TrainActor, sent.method)
        arguments = decode_arguments(method, sent.message)
        thread = self._threads.setdefault(sent.group, ThreadPoolExecutor(1))
        return thread.submit(lambda: messages.encode(getattr(self._worker, sent.method)(*arguments)))

    def close(self) -> None:
        """Wait for the running calls, and end the threads."""
        self.alive = False
        for thread in self._threads.values():
            thread.shutdown(wait=True)


class FakeCluster(Cluster):
    """Makes actors without processes, and has the event loop and the threads for their calls."""

    def __init__(self) -> None:
        self.meter = DriverMeter()
        """Counts the bytes of the messages of all handles."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._trainers: list[HostedTrainer] = []

    # ---------------- These methods make the handles of actors.

    def trainer(self, target: Answer | object, rank: int = 0) -> TrainHandle:
        """Return the handle of a train rank. target: function that answers the rank's calls, or an object with the
        methods of `TrainWorker` that the test calls."""
        return TrainHandle(lambda: self._train_process(target), f"train worker {rank}", self.meter, self)

    def engine(self, target: Answer | ServingEngine, index: int = 0) -> EngineHandle:
        """Return the handle of an engine actor. target: function that answers the actor's calls, or an engine."""
        name = f"engine {index}"
        return EngineHandle(lambda: self._engine_process(target, name), name, self.meter, self)

    def rollout(self, target: Answer | ServingEngine, index: int = 0) -> RolloutHandle:
        """Return the handle of a rollout actor. target: function that answers the actor's calls, or an engine, which
        can answer only calls of an engine."""
        name = f"rollout {index}"
        return RolloutHandle(lambda: self._engine_process(target, name), name, self.meter, self)

    def _train_process(self, target: Any) -> FakeActor:
        if callable(target):
            return FakeActor(target)
        self._trainers.append(process := HostedTrainer(target))
        return process

    def _engine_process(self, target: Any, name: str) -> FakeActor:
        return FakeActor(target) if callable(target) else HostedEngine(name, target, self.loop)

    # ---------------- Handles call these methods instead of Ray's functions.

    def ready(self, references: list[Any], timeout_s: float) -> list[Any]:
        """Return the calls that have ended. Waits up to `timeout_s` if all calls still run in the background."""
        done = [reference for reference in references if reference.done()]
        running = [reference for reference in references if isinstance(reference, Future)]
        if not done and running:
            wait(running, timeout_s, FIRST_COMPLETED)
            done = [reference for reference in running if reference.done()]
        return done

    def result(self, reference: Any) -> bytes:
        """Return the encoded result of a call. Raises RayActorError if the process has died, and RayTaskError if the
        call raised an exception."""
        try:
            return reference.result()
        except RayError:
            raise
        except (CancelledError, SystemExit) as error:  # The process was killed, or it ended itself.
            raise RayActorError from error
        except Exception as error:
            raise RayTaskError("call", str(error), error) from error

    def kill(self, ray_actor: Any) -> None:
        """Kill an actor's process."""
        ray_actor.kill()

    # ---------------- Engines run in this event loop.

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop of the hosted engines. It runs in its own thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever)
            self._thread.start()
        return self._loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the event loop of the hosted engines."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        """End the threads. The caller must close engines and trainers."""
        for trainer in self._trainers:
            trainer.close()
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
