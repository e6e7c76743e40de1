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

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...actors.engines.protocol import CommitReport
from ...actors.protocols import Span
from ...actors.weights.publisher import SendReport
from ...actors.weights.transports.protocol import WeightTransferError, WeightUpdate
from ...codecs import messages
from ..cluster.engine_pool import Engine, EnginePool
from ..cluster.handles import Call, Peer, PeerFailed, gather, gather_each
from ..config.config import SyncConfig

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
    """That serve the version now, or a later one."""
    left_out: int
    """Engines of the run that do not."""
    spans: tuple[tuple[str, tuple[Span, ...]], ...]
    """For the trace, by engine: its pause and its load, as if it had heard of them at once."""


class WeightSync:
    """Driver's side. One sync at a time."""

    def __init__(
        self, config: SyncConfig, workers: Sequence[Peer], engines: EnginePool, *, lasting: bool, direct: bool
    ) -> None:
        """lasting: whether the transport's last versions stay readable, so that another attempt needs no trainer.
        direct: whether engines may receive straight into their parameters: then all of them start, or none.
        """
        self._config = config
        self._workers = workers
        self._engines = engines
        self._lasting = lasting
        self._direct = direct
        self._cached = config.cache or config.delta
        """Whether train rank 0 keeps versions in host memory."""
        self._bound_s = config.timeout_s + MARGIN_S
        self._last: WeightUpdate | None = None

    def sync(self, version: int, engines: Sequence[Engine] | None = None) -> SyncReport:
        """Bring `engines` (None: all of the run) to `version`, the train workers' present weights.

        Engines left out earlier are tried again if they answer. One that has the version already, or a later one, keeps
        it: no engine's version ever falls. Raises NoEngineLeft when no engine of the run serves
        the version afterwards, PeerFailed when a train worker died or failed on its own.
        """
        asked = self._engines.engines if engines is None else engines
        waiting = self._answering([engine for engine in asked if engine.version < version])
        tally = _Tally()
        for attempt in range(1, ATTEMPTS + 1):
            if not waiting:
                break
            failures = self._attempt(version, waiting, tally, again=attempt > 1)
            failed = [engine for engine in waiting if engine.name in failures]
            alive = self._alive(failed)
            for engine in failed:
                engine.dead |= failures[engine.name].died
                if attempt == ATTEMPTS or self._direct or engine not in alive:
                    self._engines.leave_out(engine, str(failures[engine.name]))
            waiting = [engine for engine in waiting if engine.version != version and not engine.left_out]
        serving = [engine for engine in self._engines.active if engine.version >= version]
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
            left_out=len(self._engines.engines) - len(serving),
            spans=tuple(tally.spans),
        )

    def forget(self) -> None:
        """The train workers are others: what the last ones sent cannot be had again."""
        self._last = None

    def catch_up(self, engine: Engine) -> None:
        """Bring one engine (new, woken, or left out) to the newest version without the train workers' doing.

        From what a lasting transport still holds, or from train rank 0's host memory (`sync.cache`), beside whatever
        the train workers do. Raises PeerFailed when it did not work, and the engine stays as it was; ValueError when
        there is nothing to catch up from.
        """
        if self._last is None:
            raise ValueError("weights: no version was ever sent, nothing to catch up with")
        if not (self._lasting or self._cached):
            raise ValueError("sync.cache: got false, expected true for engines that catch up by this transport")
        failures = self._attempt(self._last.version, [engine], _Tally(), again=True)
        if failures:
            raise failures[engine.name]

    # ------------------------------------------------------------ inside

    def _attempt(self, version: int, engines: Sequence[Engine], tally: _Tally, *, again: bool) -> dict[str, PeerFailed]:
        """Announce, transfer and commit. Returns, by engine, why it does not serve the version."""
        update, sends = self._announce(version, engines, tally, again)
        payload = messages.encode(update)
        prepares = [engine.peer.call("prepare_weights", payload) for engine in engines]
        outcomes = gather_each(prepares, "weight sync", self._bound_s)
        failures = {
            engine.name: outcome
            for engine, outcome in zip(engines, outcomes, strict=True)
            if isinstance(outcome, PeerFailed)
        }
        # What an engine has prepared is whole and verified, whatever became of the others.
        ready = [engine for engine in engines if engine.name not in failures]
        if failures and self._direct and ready:
            # They have only joined: nobody may start to load what will not come whole.
            gather_each([self._workers[0].call("abort_update", "an engine failed")], "abort", HEALTH_S)
            self._drop(version, ready)
            ready = []
        failures |= self._commit(version, ready, tally)
        sent = gather_each(sends, "weight sync", self._bound_s)
        for outcome in sent:
            if isinstance(outcome, PeerFailed) and not isinstance(outcome.cause, WeightTransferError):
                raise outcome
        if sent and not isinstance(sent[0], PeerFailed):
            tally.sends.append(messages.decode(sent[0], SendReport))
        self._drop(version, [engine for engine in engines if engine.name in failures])
        return failures

    def _announce(
        self, version: int, engines: Sequence[Engine], tally: _Tally, again: bool
    ) -> tuple[WeightUpdate, list[Call]]:
        """The announcement of `version`, and the calls that send it. `again`: without another gather where possible."""
        receivers = [(engine.name, engine.num_workers) for engine in engines]
        if again and self._lasting and self._last is not None and self._last.base is None:
            return replace(self._last, receivers=tuple(engine.group for engine in engines)), []  # it is still there
        first = self._workers[0]
        if again and self._cached:
            [opened] = gather([first.call("open_cached", version, receivers)], "open update", self._bound_s)
            return messages.decode(opened, WeightUpdate), [first.call("send_cached", opened)]
        base = None if again else self._base(engines)
        [opened] = gather([first.call("open_update", version, receivers, base)], "open update", self._bound_s)
        self._last = messages.decode(opened, WeightUpdate)
        tally.gathers += 1
        others = [worker.call("send_weights", b"") for worker in self._workers[1:]]
        return self._last, [first.call("send_weights", opened), *others]

    def _base(self, engines: Sequence[Engine]) -> int | None:
        """The version that a delta may refer to: the one that all of `engines` serve and the trainer sent last."""
        if not self._config.delta or self._last is None:
            return None
        return self._last.version if {engine.version for engine in engines} == {self._last.version} else None

    def _commit(self, version: int, engines: Sequence[Engine], tally: _Tally) -> dict[str, PeerFailed]:
        wall = time.time()
        calls = [engine.peer.call("commit_weights", version, self._config.in_flight) for engine in engines]
        failures = {}
        for engine, outcome in zip(engines, gather_each(calls, "commit", self._bound_s), strict=True):
            if isinstance(outcome, PeerFailed):
                failures[engine.name] = outcome
                continue
            report = messages.decode(outcome, CommitReport)
            tally.commits.append(report)
            pause = Span("pause", wall, report.pause_s)
            tally.spans.append((engine.name, (pause, Span("load weights", wall + report.pause_s, report.load_s))))
            engine.version = version
            self._engines.take_back(engine)
        return failures

    def _answering(self, engines: Sequence[Engine]) -> list[Engine]:
        """Those in use, and of those left out the ones that answer."""
        alive = self._alive([engine for engine in engines if engine.left_out])
        return [engine for engine in engines if not engine.left_out or engine in alive]

    def _alive(self, engines: Sequence[Engine]) -> list[Engine]:
        answers = gather_each([engine.peer.call("info") for engine in engines], "health", HEALTH_S)
        for engine, answer in zip(engines, answers, strict=True):
            engine.dead |= isinstance(answer, PeerFailed) and answer.died
        return [engine for engine, answer in zip(engines, answers, strict=True) if not isinstance(answer, PeerFailed)]

    def _drop(self, version: int, engines: Sequence[Engine]) -> None:
        """Have engines forget what they have of `version`; those that do not answer have nothing to forget."""
        gather_each([engine.peer.call("drop_weights", version) for engine in engines], "drop weights", HEALTH_S)


class _Tally:
    """A SyncReport in the making."""

    def __init__(self) -> None:
        self.sends: list[SendReport] = []
        self.commits: list[CommitReport] = []
        self.spans: list[tuple[str, tuple[Span, ...]]] = []
        self.gathers = 0
