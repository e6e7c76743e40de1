"""Scores a train rank's rows with teachers, and mixes their log-probs into the columns of a distillation.

A teacher is a frozen model in the train workers, which all ranks run together, or an engine in an actor of its own,
which only the writer rank of each replica asks. Both give the same columns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ...codecs.batch import Batch
from ...codecs.jagged import concat, slice_rows
from ...dataplane.client.client import DataPlaneClient
from ...dataplane.meta import KVBatchMeta
from ..engine_actor import EngineActor, ScoreCall, ScoreReply
from ..engines.protocol import EngineDied
from ..process.remote_methods import decode_result, encode_arguments, submit
from ..protocols import TOP_IDS, TOP_LOGPROBS
from ..train_backend import MicroBatch, TokenScores, TrainBackend
from .reader import ReplicaReader
from .step_rows import TrainShard, cut

TEACHER = "teacher_logprobs"
LATE = 0.9
"""Share of the time limit of a stage within which teachers in engines must answer, so that their errors come first."""


class TeacherBackend(TrainBackend, Protocol):
    """Train backend of a teacher in the train workers, which never trains."""

    def score(
        self, micros: Iterable[MicroBatch], count: int, top_k: int, *, temperature: float = 1.0
    ) -> list[TokenScores]:
        """Return the scores of the tokens of `count` microbatches, on the rank that writes columns. Collective."""
        ...


@dataclass(frozen=True, slots=True)
class TeacherSetup:
    """Settings of one teacher, as a train worker needs them."""

    name: str
    """Name of the teacher in errors and metrics; that of its actor if it has an engine."""
    weight: float
    """Weight of its log-probs in a row, relative to the other teachers of the row."""
    source: int | None
    """Number of the data source whose rows it scores; None for all rows."""
    backend: Callable[[int, int], TeacherBackend] | None
    """Function that builds its backend, given the rank and the number of ranks; None if it has an engine."""


class EngineTeacher:
    """A teacher in an engine of its own, from the view of a train worker."""

    def __init__(self, place: str, actor: Any) -> None:
        """place: what errors say about its actor: the name, process and host. actor: Ray handle of its
        `EngineActor`."""
        self._place, self._actor = place, actor

    def score(self, batches: Sequence[Batch], top_k: int, *, temperature: float, timeout_s: float) -> list[TokenScores]:
        """Return the scores of the rows of each batch, which has the columns `input_ids` and `response_mask`.

        Raises EngineDied if the engine or its actor has died, and TimeoutError if the answers take longer than
        `timeout_s` in all. Both name the teacher, its host and the elapsed time.
        """
        started, wanted, calls = time.monotonic(), [], []
        for batch in batches:
            ids, mask = batch.jagged("input_ids"), batch.jagged("response_mask").values != 0
            call = ScoreCall(
                ids.values.numpy().astype(np.int32), np.asarray(ids.lengths, np.int32),
                mask.numpy().astype(np.uint8), top_k, temperature,
            )  # fmt: skip
            wanted.append(mask)
            calls.append(submit(self._actor, EngineActor.score, encode_arguments([call])) if mask.any() else None)
        return [
            _spread(ScoreReply.none(top_k) if call is None else self._answer(call, started, timeout_s), mask)
            for call, mask in zip(calls, wanted, strict=True)
        ]

    def _answer(self, call: Any, started: float, timeout_s: float) -> ScoreReply:
        left_s = started + timeout_s - time.monotonic()
        try:
            return decode_result(EngineActor.score, ray.get(call, timeout=max(left_s, 0.0)))
        except GetTimeoutError:
            raise TimeoutError(f"{self._after(started)}: no answer within {timeout_s:.1f} s") from None
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            kind = EngineDied if isinstance(cause, EngineDied) else RuntimeError
            raise kind(f"{self._after(started)}: {type(cause).__name__}: {cause}") from error
        except RayActorError as error:
            raise EngineDied(f"{self._after(started)}: its actor died") from error
        except RayError as error:
            raise RuntimeError(f"{self._after(started)}: its answer is lost ({type(error).__name__})") from error

    def _after(self, started: float) -> str:
        return f"distillation: {self._place} gave no scores after {time.monotonic() - started:.1f} s"


def _spread(reply: ScoreReply, wanted: torch.Tensor) -> TokenScores:
    """Return the scores of the wanted tokens of rows as columns, with 0 elsewhere. wanted: bool `[tokens]`."""

    def column(values: np.ndarray) -> torch.Tensor:
        result = torch.zeros(len(wanted), *values.shape[1:], dtype=torch.from_numpy(values[:0]).dtype)
        result[wanted] = torch.from_numpy(values)
        return result

    if reply.top_ids is None or reply.top_logprobs is None:
        return TokenScores(column(reply.logprobs))
    return TokenScores(column(reply.logprobs), column(reply.top_ids), column(reply.top_logprobs))


class Mixture:
    """Mixes the scores of several teachers for the rows of one shard, on the rank that writes them back.

    The log-probs of a row's teachers are averaged with their weights: then `log p_teacher - log p` is the sum over the
    teachers of weight times the estimate of each one's divergence, for weights that add up to 1.
    """

    def __init__(self, rows: Batch, top_k: int) -> None:
        """rows: columns `input_ids`, `response_mask` and `rollout_logprobs` of the shard's N rows."""
        self._rows = rows
        self._own = rows.jagged("rollout_logprobs").values
        self._wanted = rows.jagged("response_mask").values != 0
        self._lengths = np.asarray(rows.jagged("input_ids").lengths, np.int64)
        self._total = np.zeros(len(self._lengths))
        self._logprobs = torch.zeros(len(self._own), dtype=torch.float32)
        self._top_ids = torch.zeros(len(self._own), top_k, dtype=torch.int32)
        self._top_logprobs = torch.zeros(len(self._own), top_k, dtype=torch.float32)
        self._divergences: dict[str, tuple[float, int]] = {}

    def rows_of(self, places: np.ndarray) -> Batch:
        """Return the columns of some rows. places: their positions, int64, ascending."""
        if len(places) == len(self._lengths):
            return self._rows
        return concat([slice_rows(self._rows, 0, 0), *(slice_rows(self._rows, at, at + 1) for at in places.tolist())])

    def add(self, name: str, weight: float, places: np.ndarray, scores: Sequence[TokenScores]) -> None:
        """Add the scores of a teacher for the rows at `places`. Top tokens of different teachers must be of different
        rows."""
        chosen = np.zeros(len(self._lengths), bool)
        chosen[places] = True
        tokens = torch.from_numpy(np.repeat(chosen, self._lengths))
        logprobs = torch.cat([one.logprobs for one in scores])
        self._total[places] += weight
        self._logprobs[tokens] += weight * logprobs
        if self._top_ids.shape[1]:
            self._top_ids[tokens] = torch.cat([_given(one.top_ids) for one in scores]).to(torch.int32)
            self._top_logprobs[tokens] = torch.cat([_given(one.top_logprobs) for one in scores])
        wanted = self._wanted[tokens]
        excess = (self._own[tokens] - logprobs)[wanted].double().sum()
        self._divergences[name] = (float(excess), int(wanted.sum()))

    def scored(self, keys: Sequence[str]) -> Scored:
        """Return the mixed columns of the shard. keys: keys of its rows, for the error. Raises ValueError, naming a
        row, if no teacher scored it, and FloatingPointError, naming the teachers, for a score that is not finite."""
        bare = np.flatnonzero(self._total == 0)
        if len(bare):
            raise ValueError(
                f"distillation.teachers: no teacher scores row {keys[bare[0]]!r} ({len(bare)} of {len(keys)} rows), "
                "expected one for the data source of each row, or one without data_source"
            )
        mixed = self._logprobs / torch.from_numpy(np.repeat(self._total, self._lengths)).float()
        if not bool(mixed.isfinite().all() and self._top_logprobs.isfinite().all()):
            wrong = [name for name, (excess, _) in self._divergences.items() if not math.isfinite(excess)]
            names = ", ".join(wrong or self._divergences)  # A top token can be to blame, which no divergence shows.
            raise FloatingPointError(f"distillation: the log-probs of {names} are not all finite")
        columns = {TEACHER: mixed}
        if self._top_ids.shape[1]:
            columns |= {TOP_IDS: self._top_ids, TOP_LOGPROBS: self._top_logprobs}
        excess = (self._own - mixed)[self._wanted].double().sum()
        total = (float(excess), int(self._wanted.sum()))
        return Scored(columns, self._lengths, {**self._divergences, "": total})


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of the rows of a shard by the teachers, on the rank that writes them into the store."""

    columns: dict[str, torch.Tensor]
    """Columns of whole rows by name, each `[tokens, ...]`: `teacher_logprobs`, and the top tokens if wanted."""
    lengths: np.ndarray
    """Number of tokens of each row, int64 `[N]`."""
    divergences: dict[str, tuple[float, int]]
    """As in `WorkerReport.divergences`."""


class Teachers:
    """All teachers of a train rank."""

    def __init__(self, setups: Sequence[TeacherSetup], top_k: int, rank: int, world: int) -> None:
        """Build the backends of the teachers in the train workers. Collective. top_k: number of the most likely tokens
        that rows carry."""
        self._setups, self._top_k = setups, top_k
        self._backends = {one.name: one.backend(rank, world) for one in setups if one.backend is not None}
        self._engines: dict[str, EngineTeacher] = {}

    @property
    def backends(self) -> list[TeacherBackend]:
        """Backends of the teachers in the train workers."""
        return list(self._backends.values())

    def connect(self, names: Sequence[str], places: Sequence[str], actors: Sequence[Any]) -> None:
        """Introduce the teachers in engines, see `TrainWorker.set_teachers`."""
        for name, place, actor in zip(names, places, actors, strict=True):
            self._engines[name] = EngineTeacher(place, actor)

    def score(
        self,
        shard: TrainShard,
        meta: KVBatchMeta | None,
        reader: ReplicaReader,
        client: DataPlaneClient,
        temperature: float,
        timeout_s: float,
    ) -> Scored | None:
        """Return the mixed scores of the shard's rows on the rank that writes them, None on others. Collective.

        meta: receipt of the rows on the rank that writes; None on others. timeout_s: seconds within which a teacher in
        an engine must answer. Raises what `EngineTeacher.score` and `Mixture.columns` raise, and RuntimeError for a
        teacher in an engine that was not introduced.
        """
        rows = None if meta is None else client.get(meta, ["input_ids", "response_mask", "rollout_logprobs"])
        mixture = None if rows is None else Mixture(rows, self._top_k)
        for one in self._setups:
            part, places = shard.of_source(one.source)
            backend = self._backends.get(one.name)
            if backend is None:
                found = self._ask(one.name, mixture, places, part.sizes, temperature, timeout_s)
            else:
                if part is not shard:
                    reader.begin(part)
                with closing(reader.stream(("input_ids", "response_mask"))) as micros:
                    found = backend.score(micros, len(part.sizes), self._top_k, temperature=temperature)
                if part is not shard:
                    reader.begin(shard)
            if mixture is not None:
                mixture.add(one.name, one.weight, places, found)
        return None if mixture is None or meta is None else mixture.scored(meta.keys)

    def _ask(
        self,
        name: str,
        mixture: Mixture | None,
        places: np.ndarray,
        sizes: np.ndarray,
        temperature: float,
        limit: float,
    ) -> list[TokenScores]:
        if mixture is None:
            return []
        if name not in self._engines:
            raise RuntimeError(f"distillation: teacher {name!r} has no engine, expected one (set_teachers comes first)")
        engine, batches = self._engines[name], cut(mixture.rows_of(places), sizes.tolist())
        return engine.score(list(batches), self._top_k, temperature=temperature, timeout_s=limit)

    def close(self) -> None:
        """Close the backends of the teachers in the train workers. Idempotent."""
        for backend in self._backends.values():
            backend.close()


def _given(values: torch.Tensor | None) -> torch.Tensor:
    assert values is not None, "scores have the top tokens that were asked for"
    return values
