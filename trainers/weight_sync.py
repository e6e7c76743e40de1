"""Weight sync: from the train workers to any set of engines, version by version, never a mix.

    open update -> [gather, send | prepare in every engine] -> commit in those that have all of it
                          |
                          +-- who failed: once more, then left out (it keeps its old version and gets no requests)

stage       waits for                                     unblocked by
open        train rank 0                                  an announcement; nothing is sent yet
transfer    all train workers and all engines             every bucket verified, or a failure that names its engine
commit      engines that have the whole version           the engine's pause, load and resume

Every wait is bounded by sync.timeout_s. An engine that fails does not hold up the others; the run ends when none is
left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..actors.engines.protocol import CommitReport
from ..actors.transports.protocol import WeightTransferError, WeightUpdate
from ..actors.weight_publisher import SendReport
from ..codecs import messages
from .config import SyncConfig
from .engine_set import Engine, EngineSet
from .peers import Call, Peer, PeerFailed, gather, gather_each

MARGIN_S = 10.0
"""The ends of a transfer give up by themselves after sync.timeout_s; the driver waits so much longer for their word."""
HEALTH_S = 5.0
"""An engine that does not say who it is for so long is not asked to take part again."""
ATTEMPTS = 2
"""Of an engine to receive one version."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What bringing engines to a version took."""

    version: int
    bytes_sent: int
    """By the trainer, for all engines together; the payloads of buckets, of every attempt."""
    num_bytes: int
    """Of the weights."""
    gathers: int
    """Times that the train workers gathered the weights."""
    gather_s: float
    """Train rank 0's wait for weights."""
    pause_s: float
    """The longest that an engine took until it stood still."""
    load_s: float
    """The longest from staged bytes to an engine's parameters."""
    kept: int
    """Requests in flight that went on under the new weights."""
    aborted: int
    """Requests in flight that were ended."""
    engines: int
    """That serve the version now."""
    left_out: int
    """Engines of the run that do not."""


class WeightSync:
    """Driver's side. One sync at a time."""

    def __init__(self, config: SyncConfig, workers: Sequence[Peer], engines: EngineSet, lasting: bool) -> None:
        """lasting: whether the transport's last versions stay readable, so that another attempt needs no trainer."""
        self._config = config
        self._workers = workers
        self._engines = engines
        self._lasting = lasting
        self._cached = config.cache or config.delta
        """Whether train rank 0 keeps versions in host memory."""
        self._bound_s = config.timeout_s + MARGIN_S
        self._last: WeightUpdate | None = None

    def sync(self, version: int, engines: Sequence[Engine] | None = None) -> SyncReport:
        """Bring `engines` (None: all of the run) to `version`, the train workers' present weights.

        Engines left out earlier are tried again if they answer. Raises NoEngineLeft when no engine of the run serves
        the version afterwards, PeerFailed when a train worker died or failed on its own.
        """
        targets = self._answering(self._engines.engines if engines is None else engines)
        tally = _Tally()
        update = self._transfer(version, targets, tally)
        ready = [engine for engine in targets if engine.name in tally.prepared]
        self._commit(version, ready, tally)
        self._last = update
        serving = [engine for engine in self._engines.active if engine.version == version]
        return SyncReport(
            version=version,
            bytes_sent=sum(report.bytes_sent for report in tally.sends),
            num_bytes=update.num_bytes,
            gathers=tally.gathers,
            gather_s=sum(report.gather_s for report in tally.sends),
            pause_s=max((report.pause_s for report in tally.commits), default=0.0),
            load_s=max((report.load_s for report in tally.commits), default=0.0),
            kept=sum(report.kept for report in tally.commits),
            aborted=sum(report.aborted for report in tally.commits),
            engines=len(serving),
            left_out=len(self._engines.engines) - len(serving),
        )

    def catch_up(self, engine: Engine) -> None:
        """Bring one engine (new, woken, or left out) to the newest version without the train workers' doing.

        From what a lasting transport still holds, or from the trainer's bucket cache (`sync.cache`), beside whatever
        the train workers do. Raises PeerFailed when it did not work; the engine stays left out then.
        """
        if self._last is None:
            raise ValueError("weights: no version was ever sent, nothing to catch up with")
        calls = []
        if self._lasting and self._last.base is None:
            update = replace(self._last, receivers=(engine.group,))
        else:
            update, calls = self._open_cached(self._last.version, [engine])
        gather([*calls, engine.peer.call("prepare_weights", messages.encode(update))], "catch up", self._bound_s)
        tally = _Tally()
        self._commit(update.version, [engine], tally)
        if not tally.commits:
            raise PeerFailed(f"catch up: {engine.peer.info}: {engine.left_out}")

    # ------------------------------------------------------------ inside

    def _answering(self, engines: Sequence[Engine]) -> list[Engine]:
        """Those in use, and of those left out the ones that answer."""
        asked = [engine for engine in engines if engine.left_out]
        answers = gather_each([engine.peer.call("info") for engine in asked], "health", HEALTH_S)
        deaf = {e.name for e, answer in zip(asked, answers, strict=True) if isinstance(answer, PeerFailed)}
        return [engine for engine in engines if engine.name not in deaf]

    def _transfer(self, version: int, targets: list[Engine], tally: _Tally) -> WeightUpdate:
        """Send `version` to `targets`; who has it stands in `tally.prepared`, who does not is left out."""
        waiting = list(targets)
        update = None
        for attempt in range(1, ATTEMPTS + 1):
            if update is None or not (self._lasting or self._cached):
                update, failures = self._send(version, waiting, tally)
            elif self._lasting and update.base is None:
                failures = self._prepare(update, waiting)  # it is still where it was published
            else:
                failures = self._send_again(version, waiting, tally)
            tally.prepared |= {engine.name for engine in waiting if engine.name not in failures}
            waiting = [engine for engine in waiting if engine.name in failures]
            alive = self._alive(waiting)
            for engine in waiting:
                if attempt == ATTEMPTS or engine not in alive:
                    self._engines.leave_out(engine, str(failures[engine.name]))
            waiting = alive
            if not waiting:
                break
        assert update is not None
        return update

    def _alive(self, engines: list[Engine]) -> list[Engine]:
        answers = gather_each([engine.peer.call("info") for engine in engines], "health", HEALTH_S)
        return [engine for engine, answer in zip(engines, answers, strict=True) if not isinstance(answer, PeerFailed)]

    def _send(
        self, version: int, engines: list[Engine], tally: _Tally
    ) -> tuple[WeightUpdate, dict[str, PeerFailed | str]]:
        """One gather and transfer. Returns the update and, by engine, why it does not have the version."""
        receivers = [(engine.name, engine.num_workers) for engine in engines]
        [opened] = gather(
            [self._workers[0].call("open_update", version, receivers, self._base(engines))],
            "open update",
            self._bound_s,
        )
        update = messages.decode(opened, WeightUpdate)
        sends = [worker.call("send_weights", opened) for worker in self._workers]
        prepares = [engine.peer.call("prepare_weights", opened) for engine in engines]
        outcomes = gather_each([*sends, *prepares], "weight sync", self._bound_s)
        sent, prepared = outcomes[: len(sends)], outcomes[len(sends) :]
        failures: dict[str, PeerFailed | str] = {
            engine.name: outcome
            for engine, outcome in zip(engines, prepared, strict=True)
            if isinstance(outcome, PeerFailed)
        }
        for outcome in sent:
            if isinstance(outcome, PeerFailed) and not isinstance(outcome.cause, WeightTransferError):
                self._drop(version, engines)
                raise outcome
        tally.gathers += 1
        if isinstance(sent[0], PeerFailed):
            # Not sent whole: what the engines that had no failure of their own received is not to be trusted either.
            failures = {engine.name: failures.get(engine.name, sent[0]) for engine in engines}
        else:
            tally.sends.append(messages.decode(sent[0], SendReport))
        self._drop(version, [engine for engine in engines if engine.name in failures])
        return update, failures

    def _open_cached(self, version: int, engines: Sequence[Engine]) -> tuple[WeightUpdate, list[Call]]:
        """A version that was sent before, from train rank 0's host memory: its announcement, and the call that sends
        it, beside whatever the train workers do."""
        receivers = [(engine.name, engine.num_workers) for engine in engines]
        [opened] = gather([self._workers[0].call("open_cached", version, receivers)], "open update", self._bound_s)
        return messages.decode(opened, WeightUpdate), [self._workers[0].call("send_cached", opened)]

    def _send_again(self, version: int, engines: list[Engine], tally: _Tally) -> dict[str, PeerFailed | str]:
        """Without another gather."""
        update, [send] = self._open_cached(version, engines)
        failures = self._prepare(update, engines)
        [sent] = gather_each([send], "weight sync", self._bound_s)
        if isinstance(sent, PeerFailed):
            return {engine.name: failures.get(engine.name, sent) for engine in engines}
        tally.sends.append(messages.decode(sent, SendReport))
        return failures

    def _prepare(self, update: WeightUpdate, engines: list[Engine]) -> dict[str, PeerFailed | str]:
        payload = messages.encode(replace(update, receivers=tuple(engine.group for engine in engines)))
        calls = [engine.peer.call("prepare_weights", payload) for engine in engines]
        outcomes = gather_each(calls, "weight sync", self._bound_s)
        return {e.name: found for e, found in zip(engines, outcomes, strict=True) if isinstance(found, PeerFailed)}

    def _base(self, engines: Sequence[Engine]) -> int | None:
        """The version that a delta may refer to: the one that all of `engines` serve and the trainer sent last."""
        if not self._config.delta or self._last is None:
            return None
        return self._last.version if {engine.version for engine in engines} == {self._last.version} else None

    def _commit(self, version: int, engines: Sequence[Engine], tally: _Tally) -> None:
        calls = [engine.peer.call("commit_weights", version, self._config.in_flight) for engine in engines]
        for engine, outcome in zip(engines, gather_each(calls, "commit", self._bound_s), strict=True):
            if isinstance(outcome, PeerFailed):
                self._engines.leave_out(engine, str(outcome))
                continue
            tally.commits.append(messages.decode(outcome, CommitReport))
            engine.version = version
            self._engines.take_back(engine)

    def _drop(self, version: int, engines: Sequence[Engine]) -> None:
        """Have engines forget what they have of `version`; those that do not answer have nothing to forget."""
        calls: list[Any] = [engine.peer.call("drop_weights", version) for engine in engines]
        gather_each(calls, "drop weights", HEALTH_S)


class _Tally:
    """A SyncReport in the making."""

    def __init__(self) -> None:
        self.sends: list[SendReport] = []
        self.commits: list[CommitReport] = []
        self.prepared: set[str] = set()
        self.gathers = 0
