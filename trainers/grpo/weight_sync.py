"""Syncs weights: brings engines to the train workers' version of the weights; no engine serves an incomplete version.

    open update -> [gather, send | prepare in every engine] -> commit in the engines that have all of it
                          |
                          +-- an engine that failed is tried once more, then left out: it gets no requests

stage       waits for                                     unblocked by
hold        engines without staging, if in_flight=wait    the end of their running requests
open        train rank 0                                  the announcement; nothing is sent yet
transfer    all train workers and all engines             every bucket verified, or a failure that names its engine
commit      the engines that have the whole version       each engine's pause, load and resume
verify      the same, if sync.verify says so              each engine's comparison with the trainer's digests

An engine with room for a second version stages it completely before the commit. One without (`staging: none`) only
joins the transfer and receives during the commit: if that fails, the engine has no complete version, and its requests
wait for the next attempt.

A wait ends sync.timeout_s and a margin after the last progress. Progress is a token of a request that is waited for, or
a bucket or weight that arrives. An engine that fails does not hold up the others; the run ends when no engine is left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...actors.engines.protocol import CommitReport, EngineDied, PauseMode
from ...actors.protocols import Span
from ...actors.weight_sync.stream import SendReport
from ...actors.weight_sync.transports.protocol import WeightTransferError, WeightUpdate
from ..cluster.calls import ActorFailed, Call, gather, gather_each, gather_moving, settled
from ..cluster.engine_pool import Engine, EnginePool
from ..cluster.handles import EngineHandle, TrainHandle
from ..config.config import SyncConfig

MARGIN_S = 10.0
"""Seconds added to sync.timeout_s when the driver waits for progress, because the sender and the receivers of a
transfer stop by themselves after sync.timeout_s."""
HEALTH_S = 5.0
"""Seconds that a sync waits for an engine's answer to a `ping`. Later syncs do not wait for the same answer. An engine
that answers late takes part in the next sync."""
ATTEMPTS = 2
"""Number of failed attempts to receive one version after which an engine gets no more requests."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Measurements of one weight sync."""

    version: int
    bytes_sent: int
    """Number of bytes that the trainer sent to all engines: the payloads of buckets in every attempt."""
    num_bytes: int
    """Size of the weights in bytes."""
    gathers: int
    """Number of times that the train workers gathered the full weights."""
    gather_s: float
    """Seconds for which train rank 0 waited for gathered weights."""
    pause_s: float
    """Seconds that the slowest engine took to pause."""
    load_s: float
    """Seconds that the slowest engine took to load the staged bytes into its parameters."""
    kept: int
    """Number of requests in flight that continued with the new weights."""
    aborted: int
    """Number of requests in flight that were aborted."""
    engines: int
    """Number of engines that now serve the version or a later one."""
    verified: int
    """Number of weights that engines have compared with the trainer's since the last report, summed over the engines.
    Engines that caught up alone are included."""
    left_out: int
    """Number of engines that serve neither the version nor a later one. Engines that a pool has put to sleep do not
    count."""
    spans: tuple[tuple[str, tuple[Span, ...]], ...]
    """Spans of each engine's pause and load for the trace, as (engine name, spans). Their times assume that every
    engine began at the same moment."""


class WeightSync:
    """The driver's side of weight updates: brings engines to the train workers' version. Runs one sync at a time."""

    def __init__(
        self,
        config: SyncConfig,
        workers: Sequence[TrainHandle],
        engines: EnginePool,
        *,
        lasting: bool,
        in_cache: int | None = None,
        adapter: bool = False,
        every_rank: bool = False,
    ) -> None:
        """Prepare the syncs of a run. every_rank: true if every train worker sends its part of the weights, false if
        the first one sends all of them. lasting: true if the transport keeps the last versions readable after they were
        sent, so that another attempt needs no train worker. in_cache: version that train rank 0 has in host memory from
        the start; None without one. adapter: true if the versions are those of an adapter, which engines keep beside
        the one with which running requests finish. They are always verified."""
        self._config, self._adapter = config, adapter
        self._workers = workers
        self._senders = workers if every_rank else workers[:1]
        self._engines = engines
        self._lasting = lasting
        self._cached = (config.cache or config.delta) and not every_rank
        """Whether train rank 0 keeps the last versions in host memory."""
        self._bound_s = config.timeout_s + MARGIN_S
        self._last: WeightUpdate | None = None
        """Announcement of the version that was gathered last; None when no version can be sent again."""
        self._whole = False
        """Whether the version in `_last` was sent completely, so that a transport that keeps versions still has it."""
        self._in_cache = in_cache
        """Newest version that is whole in train rank 0's host memory; None if there is none."""
        self._verified = 0
        """Number of weights that engines have compared with the trainer's since the last report."""

    def sync(self, version: int, engines: Sequence[Engine] | None = None) -> SyncReport:
        """Bring `engines` (None: all engines of the run) to `version`, that of the train workers' current weights.

        Engines that were left out earlier are tried again if they answer. Engines that a pool has put to sleep are not.
        An engine that already serves the version or a later one keeps it. An engine returns to an older version only if
        it has no complete one. Raises NoEngineLeft if all engines of the run are left out afterwards, and ActorFailed
        if a train worker died, or failed for a reason other than the transfer to an engine; engines without a complete
        version are then marked `broken`.
        """
        asked = [engine for engine in (self._engines.engines if engines is None else engines) if not engine.asleep]
        waiting = self._answering([engine for engine in asked if engine.version < version or engine.broken])
        tally, tries = _Tally(), Counter[str]()
        while waiting:
            failures = self._attempt(version, waiting, tally, again=tally.announced)
            failed = [engine for engine in waiting if engine.name in failures]
            # The receivers that the sender names have failed. In a broadcast, they made the other engines lose their
            # version.
            tries.update({engine.name for engine in failed} & tally.blamed or {engine.name for engine in failed})
            alive = self._alive(failed)
            self._notice_late(version, [engine for engine in alive if not engine.broken])
            for engine in failed:
                failure = failures[engine.name]
                engine.dead |= _died(failure)
                if engine.version != version or engine.broken:
                    if tries[engine.name] >= ATTEMPTS or engine.dead or engine not in alive:
                        self._engines.exclude(engine, str(failure))
            waiting = [
                engine for engine in waiting if (engine.version != version or engine.broken) and not engine.left_out
            ]
        serving = [engine for engine in self._engines.active if engine.version >= version and not engine.broken]
        verified, self._verified = self._verified, 0
        return SyncReport(
            version=version,
            bytes_sent=sum(report.bytes_sent for report in tally.sends),
            num_bytes=0 if self._last is None else self._last.num_bytes,
            gathers=tally.gathers,
            gather_s=sum(report.gather_s for report in tally.sends),
            pause_s=max((report.pause_s for report in tally.commits), default=0.0),
            load_s=max((report.load_s for report in tally.commits), default=0.0),
            kept=sum(report.kept for report in tally.commits),
            aborted=sum(report.aborted for report in tally.commits),
            engines=len(serving),
            verified=verified,
            left_out=sum(not engine.asleep for engine in self._engines.engines) - len(serving),
            spans=tuple(tally.spans),
        )

    def keep(self, version: int) -> None:
        """Make the train workers gather `version` into train rank 0's host memory, without sending it. Does nothing if
        that memory already holds the version. Raises ActorFailed if a worker fails."""
        if self.kept != version:
            gather([worker.cache_weights(version) for worker in self._workers], "cache weights", self._bound_s)
            self._last, self._in_cache = None, version

    def forget(self) -> None:
        """Forget the version that was sent last. The train workers that sent it were replaced and can no longer provide
        it."""
        self._last = self._in_cache = None

    @property
    def kept(self) -> int | None:
        """Newest version that an engine can get while the train workers do other work. The source is the transport, if
        it still has the whole version, or train rank 0's host memory (`sync.cache`). None without such a version."""
        return self._last.version if self._last is not None and self._still_there else self._in_cache

    def catch_up(self, engine: Engine) -> None:
        """Bring one engine, such as a new one or one that was left out, to the version `kept`. The train workers can do
        other work meanwhile. The weights are not gathered again. Raises ActorFailed if the transfer fails; an engine
        that stages new versions then stays as it was. Raises ValueError if no version is kept, because none was ever
        sent, the last one was not sent whole, or neither source keeps versions.
        """
        version = self.kept
        if version is None:
            last = "none was sent yet" if self._last is None else f"version {self._last.version} was sent last"
            raise ValueError(
                f"weights: {engine.name!r} cannot catch up, because no version is kept ({last}), expected a version "
                "that was sent whole by a transport that keeps it, or sync.cache=true"
            )
        failures = self._attempt(version, [engine], _Tally(), again=True)
        if failures:
            raise failures[engine.name]

    def _attempt(
        self, version: int, engines: Sequence[Engine], tally: _Tally, *, again: bool
    ) -> dict[str, ActorFailed]:
        """Make one attempt at a sync: announce the version, transfer it and commit it. Running requests end before the
        transfer where this is necessary. Returns the engines that failed: name -> failure. If the failure of one engine
        ends the transfer early, the failures do not include engines without staging, although these do not serve the
        version."""
        tally.blamed = set()
        held = [engine for engine in engines if self._must_be_held(engine)]
        started = time.monotonic()
        try:
            failures = self._hold(held)
            tally.held = dict.fromkeys([engine.name for engine in held], time.monotonic() - started)
            engines = [engine for engine in engines if engine.name not in failures]
            if engines:
                failures |= self._transfer(version, engines, tally, again)
            return failures
        finally:
            gather_each([engine.handle.resume() for engine in held], "resume", HEALTH_S)

    def _transfer(self, version: int, engines: Sequence[Engine], tally: _Tally, again: bool) -> dict[str, ActorFailed]:
        update, sends = self._announce(version, engines, tally, again)
        prepares = [engine.handle.prepare_weights(update) for engine in engines]
        outcomes = gather_moving(prepares, "weight sync", self._bound_s, EngineHandle.progress)
        failures = _failures(engines, outcomes)
        for engine, outcome in zip(engines, outcomes, strict=True):
            if not isinstance(outcome, ActorFailed):
                engine.joins = outcome == "joined"
        # A version that an engine has staged is complete and verified, even if other engines failed.
        ready = [engine for engine in engines if engine.name not in failures]
        joined = [engine for engine in ready if engine.joins]
        if failures and joined:
            # Engines that have only joined the transfer would otherwise load an incomplete version.
            aborts = [sender.abort_update("an engine failed", update) for sender in self._senders]
            gather_each(aborts, "abort", HEALTH_S)
            self._drop(version, joined)
            ready = [engine for engine in ready if not engine.joins]
        failures |= self._serve(version, ready, sends, tally)
        self._drop(version, [engine for engine in engines if engine.name in failures])
        return failures

    def _serve(
        self, version: int, ready: Sequence[Engine], sends: Sequence[Call[SendReport | None]], tally: _Tally
    ) -> dict[str, ActorFailed]:
        """Commit the version in the engines that have prepared it, wait until it is sent, and have them verify it.
        Returns the engines that failed: name -> failure."""
        if self._config.verify == "off" and not self._adapter:
            failures = self._commit(version, ready, tally)
            self._wait_sent(version, sends, tally)
            return failures
        try:
            failures = self._stop(ready, tally)
            failures |= self._commit(version, [engine for engine in ready if engine.name not in failures], tally)
            loaded = [engine for engine in ready if engine.name not in failures]
            for engine in loaded:
                engine.broken = True  # The engine counts as broken until the comparison has succeeded.
            self._wait_sent(version, sends, tally)
            return failures | self._verify(version, loaded)
        finally:
            # An engine whose version was not compared stays stopped, also if the trainer failed, until a later sync.
            sound = [engine for engine in ready if not engine.broken]
            gather_each([engine.handle.resume() for engine in sound], "resume", HEALTH_S)

    def _wait_sent(self, version: int, sends: Sequence[Call[SendReport | None]], tally: _Tally) -> None:
        """Wait until the train workers have sent the version, and record the costs of the transfer. Raises ActorFailed
        if a worker failed for a reason other than the transfer to an engine."""
        sent = gather_moving(sends, "weight sync", self._bound_s, TrainHandle.sent)
        for outcome in sent:
            if isinstance(outcome, ActorFailed) and not isinstance(outcome.cause, WeightTransferError):
                raise outcome
        reports = [outcome for outcome in sent if isinstance(outcome, SendReport)]
        self._whole |= bool(reports)
        if sends and self._cached and (self._config.delta or not self._lasting):
            self._in_cache = version  # The cache has the complete version even if an engine lost it.
        tally.sends += reports
        causes = [outcome.cause for outcome in sent if isinstance(outcome, ActorFailed)]
        tally.blamed = {name for cause in causes if isinstance(cause, WeightTransferError) for name in cause.engines}

    def _must_be_held(self, engine: Engine) -> bool:
        """Return whether the engine's running requests must end before a transfer begins. This is the case if in_flight
        is `wait` and the engine receives during its commit, because the sender would otherwise wait for these requests.
        An engine before its first update is assumed to receive during its commit unless `sync.staging` is `full`. An
        adapter is never received during a commit.
        """
        if self._adapter:
            return False
        may_join = self._config.staging != "full" if engine.joins is None else engine.joins
        return self._config.in_flight == "wait" and may_join

    def _hold(self, engines: Sequence[Engine], mode: PauseMode = "wait") -> dict[str, ActorFailed]:
        """Make new requests to `engines` wait, and wait until the running requests have ended (for `keep`: are frozen).
        Returns the engines that failed: name -> failure."""
        pauses = [engine.handle.pause(mode) for engine in engines]
        return _failures(engines, gather_moving(pauses, "hold", self._bound_s, EngineHandle.progress))

    def _notice_late(self, version: int, engines: Sequence[Engine]) -> None:
        """Query the version of `engines` that failed a call or did not answer in time. Those that serve
        `version` get requests again."""
        answers = gather_each([engine.handle.version() for engine in engines], "version", HEALTH_S)
        for engine, answer in zip(engines, answers, strict=True):
            if answer == version:
                engine.version = version
                self._engines.readmit(engine)

    def _announce(
        self, version: int, engines: Sequence[Engine], tally: _Tally, again: bool
    ) -> tuple[WeightUpdate, Sequence[Call[SendReport | None]]]:
        """Return the announcement of `version` and the calls that send its weights. again: whether this is a repeated
        attempt, which avoids gathering the weights again if possible."""
        receivers = [engine.group for engine in engines]
        tally.announced = True
        if again and self._last is not None and self._still_there:
            return replace(self._last, receivers=tuple(receivers)), []
        first = self._workers[0]
        if again and self._cached:
            [update] = gather([first.open_cached(version, receivers)], "open update", self._bound_s)
            return update, [first.send_cached(update)]
        base = None if again else self._base(engines)
        self._whole = False
        [self._last] = gather([first.open_update(version, receivers, base)], "open update", self._bound_s)
        tally.gathers += 1
        sending = self._last
        return sending, [worker.send_weights(sending if worker in self._senders else None) for worker in self._workers]

    @property
    def _still_there(self) -> bool:
        """Return whether the transport still offers the whole version in `_last`. It needs no earlier version."""
        return self._lasting and self._whole and self._last is not None and self._last.base is None

    def _base(self, engines: Sequence[Engine]) -> int | None:
        """Return the version that a delta update can be based on, which is the one that was sent last. Returns None if
        not all of `engines` serve it or deltas are off."""
        if not self._config.delta or self._last is None:
            return None
        return self._last.version if {engine.version for engine in engines} == {self._last.version} else None

    def _commit(self, version: int, engines: Sequence[Engine], tally: _Tally) -> dict[str, ActorFailed]:
        """Make `engines` load and serve the version that they have prepared. Returns the engines that failed: name ->
        failure."""
        wall, in_flight, kv = time.time(), self._config.in_flight, self._config.kv
        if self._adapter:  # Requests in flight keep their version of the adapter.
            in_flight, kv = "abort" if in_flight == "abort" else "keep", "keep"
        calls = [engine.handle.commit_weights(version, in_flight, kv) for engine in engines]
        outcomes = gather_moving(calls, "commit", self._bound_s, EngineHandle.progress)
        for engine, report in zip(engines, outcomes, strict=True):
            engine.broken = isinstance(report, ActorFailed) and (engine.broken or bool(engine.joins))
            if isinstance(report, ActorFailed):
                continue
            report = replace(report, pause_s=report.pause_s + tally.held.get(engine.name, 0.0))
            tally.commits.append(report)
            pause = Span("pause", wall, report.pause_s)
            tally.spans.append((engine.name, (pause, Span("load weights", wall + report.pause_s, report.load_s))))
            engine.version = version
            self._engines.readmit(engine)
        return _failures(engines, outcomes)

    def _stop(self, engines: Sequence[Engine], tally: _Tally) -> dict[str, ActorFailed]:
        """Stop `engines` from generating until their weights are verified, so that no wrong version generates a token.
        Returns the engines that failed: name -> failure."""
        started = time.monotonic()
        waits = self._config.in_flight == "wait" and not self._adapter
        failures = self._hold(engines, "wait" if waits else "keep")
        for engine in engines:
            tally.held[engine.name] = tally.held.get(engine.name, 0.0) + time.monotonic() - started
        return failures

    def _verify(self, version: int, engines: Sequence[Engine]) -> dict[str, ActorFailed]:
        """Make `engines`, which have committed the version, compare their weights with the trainer's. Returns the
        engines that failed, which stay marked as `broken`: name -> failure. Raises ActorFailed if the trainer
        failed."""
        if not engines:
            return {}
        [digests] = gather([self._workers[0].weight_digests(version)], "weight digests", self._bound_s)
        calls = [engine.handle.verify_weights(digests) for engine in engines]
        outcomes = gather_moving(calls, "verify", self._bound_s, EngineHandle.progress)
        for engine, outcome in zip(engines, outcomes, strict=True):
            if not isinstance(outcome, ActorFailed):
                engine.broken = False
                self._verified += outcome
        return _failures(engines, outcomes)

    def _answering(self, engines: Sequence[Engine]) -> list[Engine]:
        """Return the `engines` that are in use, and the left-out engines that answer again."""
        alive = self._alive([engine for engine in engines if engine.left_out])
        return [engine for engine in engines if not engine.left_out or engine in alive]

    def _alive(self, engines: Sequence[Engine]) -> list[Engine]:
        """Return those of `engines` that answer a `ping`. Dead engines are marked as dead. Pings without
        an answer are kept, so that a later call can receive the answer."""
        asked = [engine for engine in engines if engine.ping is None]
        for engine in asked:
            engine.ping = engine.handle.ping()
        by_call = {engine.ping: engine for engine in engines if engine.ping is not None}
        answers = [
            *settled([call for call, engine in by_call.items() if engine not in asked], "health", 0.0),
            *settled([call for call, engine in by_call.items() if engine in asked], "health", HEALTH_S),
        ]
        alive = []
        for call, answer in answers:
            engine = by_call[call]
            engine.ping = None
            if isinstance(answer, ActorFailed):
                engine.dead |= _died(answer)
            else:
                alive.append(engine)
        return [engine for engine in engines if engine in alive]

    def _drop(self, version: int, engines: Sequence[Engine]) -> None:
        """Make engines discard the buckets of `version` that they have received. Failures are ignored: an engine that
        does not answer has nothing to discard."""
        gather_each([engine.handle.drop_weights(version) for engine in engines], "drop weights", HEALTH_S)


def _failures(engines: Sequence[Engine], outcomes: Sequence[object]) -> dict[str, ActorFailed]:
    return {
        engine.name: outcome
        for engine, outcome in zip(engines, outcomes, strict=True)
        if isinstance(outcome, ActorFailed)
    }


def _died(failure: ActorFailed) -> bool:
    return failure.died or isinstance(failure.cause, EngineDied)


class _Tally:
    """Accumulates the measurements of one sync, over all its attempts, for its SyncReport."""

    def __init__(self) -> None:
        self.sends: list[SendReport] = []
        self.commits: list[CommitReport] = []
        self.spans: list[tuple[str, tuple[Span, ...]]] = []
        self.gathers = 0
        self.announced = False
        """Whether an attempt has announced the update."""
        self.held: dict[str, float] = {}
        """Engines whose running requests had to end before the last attempt's transfer: name -> seconds until they had
        ended."""
        self.blamed: set[str] = set()
        """Names of the engines that the sender of the last attempt named as the cause of its failure."""
