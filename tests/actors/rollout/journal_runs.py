"""Runs with a journal, in small: a data plane and a rollout worker that live and die together, over one folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.actors.engines.protocol import Completion, Generator, SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.environments.factory import SingleTurn
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA, Prompt, Sample
from headrace.actors.rewards.builtin import exact_match, per_position
from headrace.actors.rewards.rubric import Rubric
from headrace.actors.rollout.journal import GroupJournal, JournalConfig, JournaledGroup
from headrace.actors.rollout.prompt_sources import TaskSource
from headrace.actors.rollout.prompts import PromptStream, base36
from headrace.actors.rollout.results import RolloutReport
from headrace.actors.rollout.turn_journal import TurnJournal
from headrace.actors.rollout.worker import RolloutWorker
from headrace.codecs.jagged import unpack
from headrace.dataplane.config import StoreKind
from headrace.dataplane.factory import connect, connect_async
from headrace.testing.data_plane import open_plane

PARTITION, TASK = "train", "train"
SAMPLES = 2
EOS = 2


class Killed(RuntimeError):
    """Stands for a `kill -9` of the whole run at a chosen moment."""


def open_journal(folder: Path, writer: str = "rollout 0", fingerprint: str = "one") -> GroupJournal:
    return GroupJournal(JournalConfig(str(folder), fingerprint), writer)


def open_cut_journal(folder: Path, num_bytes: int | None) -> GroupJournal:
    """One whose process is killed in its first append (see CutJournal)."""
    return CutJournal(JournalConfig(str(folder), "one"), "rollout 0", num_bytes)


def segments(folder: Path) -> list[Path]:
    """The journal's files, oldest first."""
    return sorted(folder.glob("*.journal"), key=lambda path: int(path.stem.rpartition("-")[2]))


class CutJournal(GroupJournal):
    """Its process is killed when only `num_bytes` of what it appends are written; None: right behind all of them."""

    def __init__(self, config: JournalConfig, writer: str, num_bytes: int | None) -> None:
        super().__init__(config, writer)
        self._num_bytes = num_bytes

    def append(self, groups: Iterable[JournaledGroup]) -> None:
        super().append(groups)
        if self._num_bytes is not None:
            os.truncate(segments(self._folder)[-1], self._num_bytes)
        raise Killed


class _Noted(EpisodeHost):
    """Tells of each prompt before it is generated."""

    def __init__(self, note: Callable[[Prompt], None], environment: Any) -> None:
        super().__init__(environment)
        self._note = note

    async def run(self, prompt: Prompt, engine: Generator, tokenizer: Any, params: SamplingParams) -> list[Sample]:
        self._note(prompt)
        return await super().run(prompt, engine, tokenizer, params)


class _Mortal(ScriptedEngine):
    """Dies after `answers` answers."""

    def __init__(self, answers: int, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._left = answers
        self.made: list[tuple[str, list[int]]] = []
        """Request id and tokens of each completion."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        if not self._left:
            raise Killed
        self._left -= 1
        completions = await super().generate(request_id, prompt_ids, params)
        self.made += [(request_id, one.token_ids.tolist()) for one in completions]
        return completions


class Life:
    """One run, from start to kill. `version` is that of its engine, which tells its rows from others'."""

    def __init__(
        self,
        tokenizer: Any,
        journal: GroupJournal | None,
        *,
        version: int = 0,
        store: StoreKind = "local",
        rewards: Sequence[tuple[str, Any, float]] = (),
        latency_s: float = 0.0,
        log: Path | None = None,
        environment: Any = None,
        piece_tokens: int | None = None,
        answers: int = 1 << 30,
    ) -> None:
        """latency_s: median of a group's, log-normal. log: where each position is written that is generated.
        environment: plays the episodes; None plays single turns. piece_tokens: see `TurnJournal`; None keeps no turns.
        answers: number of answers after which the engine dies."""
        self.generated: list[int] = []
        """Positions whose groups were begun to be generated."""
        self.cut_put = ""
        """When it is killed: `before` a put, or `behind` it; "": not there."""
        self.made: list[tuple[str, list[int]]] = []
        """Request id and tokens of each completion of its last rollout."""
        self._environment, self._piece_tokens, self._answers = environment or SingleTurn(), piece_tokens, answers
        self._latency_s = latency_s
        self._log = None if log is None else os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._tokenizer = tokenizer
        self._journal = journal
        self._version = version
        self._rubric = Rubric([("exact_match", exact_match, 0.5), ("per_position", per_position, 0.25), *rewards])
        self._plane = open_plane(store)
        self._driver = connect(self._plane.handle, name="driver")
        self._driver.register(PARTITION, ROLLOUT_SCHEMA, [TASK], group_size=SAMPLES)

    def rollout(self, positions: Sequence[int], *, fresh: bool = False) -> RolloutReport:
        return asyncio.run(self._rollout(positions, fresh))

    async def _rollout(self, positions: Sequence[int], fresh: bool) -> RolloutReport:
        client = connect_async(self._plane.handle, name="rollout 0")
        put = client.put

        async def cut_put(*args: Any, **options: Any) -> Any:
            if self.cut_put == "before":
                raise Killed
            receipt = await put(*args, **options)
            if self.cut_put == "behind":
                raise Killed
            return receipt

        setattr(client, "put", cut_put)  # noqa: B010
        engine = _Mortal(
            self._answers, self._script, latency_s=self._latency_s, latency_sigma=1.0, seed=self._version,
            version=self._version,
        )  # fmt: skip
        self.made, journal, turns = engine.made, self._journal, None
        if self._piece_tokens is not None:
            assert journal is not None
            config = JournalConfig(str(journal._folder), "one")
            turns = TurnJournal(config, "rollout 0", journal, self._piece_tokens)
        worker = RolloutWorker(
            engine=engine,
            environment=_Noted(self._note, self._environment),
            tokenizer=self._tokenizer,
            rubric=self._rubric,
            prompts=PromptStream(TaskSource("reverse", held_out=False)),
            held_out={},
            client=client,
            journal=journal,
            turns=turns,
        )
        try:
            report = await worker.rollout(positions, PARTITION, SamplingParams(n=SAMPLES, max_new_tokens=9), fresh)
            await worker.trim_journal(0, ())
            return report
        finally:
            await worker.close()

    def _note(self, prompt: Prompt) -> None:
        position = int(prompt.uid, 36)
        self.generated.append(position)
        if self._log is not None:
            os.write(self._log, f"{position}\n".encode())

    def _script(self, request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
        """Sample 0 is right, sample 1 is not; both say which life they are of."""
        digits = list(prompt_ids[1:-1])
        return [*(reversed(digits) if sample == 0 else [3 + self._version, *digits]), EOS]

    def rows(self) -> dict[str, dict[str, Any]]:
        """All rows in the data plane: key -> its fields, version and tags. Raises where a key would be there twice."""
        num_rows = self._driver.status(PARTITION).rows
        if not num_rows:
            return {}
        meta = self._driver.claim(PARTITION, TASK, ROLLOUT_FIELDS, num_rows, whole_groups=True, timeout_s=5)
        columns = unpack(self._driver.get(meta))
        rows = {
            key: {
                **{name: column[row].tolist() for name, column in columns.items()},
                "version": int(meta.versions[row]),
                **{name: float(values[row]) for name, values in meta.tags.items()},
            }
            for row, key in enumerate(meta.keys)
        }
        assert len(rows) == num_rows
        return rows

    def end(self) -> None:
        """Gone, with everything that was in the data plane."""
        self._driver.close()
        self._plane.close()
        if self._journal is not None:
            self._journal.close()  # as the end of its process does


def keys_of(positions: Sequence[int]) -> list[str]:
    return [f"{base36(position)}.{sample}" for position in positions for sample in range(SAMPLES)]


def versions_of(rows: dict[str, dict[str, Any]]) -> dict[int, int]:
    """Position -> version of its group's rows."""
    found = {}
    for key, row in rows.items():
        uid, _, _ = key.rpartition(".")
        assert found.setdefault(int(uid, 36), row["version"]) == row["version"]
        assert np.max(np.reshape(row["version_spans"], (-1, 2))[:, 1]) == row["version"]
    return found
