"""The rollout actor: a Ray actor that hosts one rollout worker, built from plain data.

It embeds its engine, or sends its prompts to engine actors through a router; the driver hands it their handles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...dataplane.factory import connect_async
from ...dataplane.handle import DataPlaneHandle
from ..engine_actor import EngineHost
from ..engines.config import RolloutConfig
from ..engines.factory import EngineConfig, build_engine
from ..engines.protocol import EngineDied, SamplingParams
from ..engines.remote import RemoteEngine
from ..engines.router import Router
from ..engines.tokenizer import load_tokenizer
from ..environments.factory import build_environment
from ..rewards.config import RewardFunctionConfig
from ..rewards.factory import build_rubric
from .config import DataConfig
from .journal import GroupJournal, JournalConfig
from .prompts import PromptStream, check_prompt_lengths, open_source
from .report import RolloutReport, ValidationReport
from .worker import RolloutWorker

VALIDATION_UID = "val-"
"""Prefix of held-out prompts' uids: the training stream's are base 36 and never hold a hyphen."""


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """What a rollout actor is built from. Plain data."""

    name: str
    """For errors, traces and the data plane's status."""
    threads: int
    """Compute threads of this process."""
    seed: int
    """Seed of a generated task's prompts, and of the order in which a finite source is gone through."""
    engine: EngineConfig | None
    """Embedded here; None: the engines are actors of their own, which `set_engines` and `add_engine` bring."""
    rollout: RolloutConfig
    """The environment's keys are read here; the engine has its own copy."""
    tokenizer: str
    """Folder or hub id."""
    rewards: tuple[RewardFunctionConfig, ...]
    tagged_rewards: frozenset[str]
    """Labels of the rewards whose own value rows are tagged with, for advantages that need more than the total."""
    data: DataConfig
    validates: bool
    """Whether validation prompts are opened, too."""
    check_prompts: bool
    """Whether this actor looks for prompts above `data.max_prompt_tokens`, which are an error, in both sources."""
    data_plane: DataPlaneHandle
    engine_timeout_s: float = 120.0
    """With engine actors: how long a request waits for one when none is left."""
    journal: JournalConfig | None = None
    """None: finished groups are not kept."""


class RolloutActor(EngineHost):
    """Hosts one RolloutWorker; an async Ray actor: `ray.remote(RolloutActor).options(...).remote(setup)`."""

    def __init__(self, setup: RolloutSetup) -> None:
        super().__init__(setup.name)
        self._setup = setup
        self._worker: RolloutWorker | None = None

    async def build(self) -> None:
        """Load tokenizer, model, prompts and rewards and join the data plane. Raises ValueError in one sentence.

        Apart from the constructor, whose errors Ray would bury in the actor's death.
        """
        self._worker = await asyncio.to_thread(self._build)

    def _build(self) -> RolloutWorker:
        setup = self._setup
        torch.set_num_threads(setup.threads)
        rubric = build_rubric(setup.rewards, setup.tagged_rewards)
        tokenizer = load_tokenizer(setup.tokenizer)
        parts = (False, True) if setup.validates else (False,)
        sources = [open_source(setup.data, tokenizer, seed=setup.seed, validation=part) for part in parts]
        if setup.check_prompts:
            for source in sources:
                check_prompt_lengths(source, tokenizer, setup.data.max_prompt_tokens)
        prompts = PromptStream(sources[0], seed=setup.seed)
        held_out = PromptStream(sources[1], shuffle=False, uid_prefix=VALIDATION_UID) if len(sources) > 1 else None
        if setup.engine is None:
            engine = Router(timeout_s=setup.engine_timeout_s, on_left_out=lambda left: self._built.note_left_out(left))
        else:
            engine = build_engine(setup.engine)
        self._hosted = engine
        return RolloutWorker(
            engine=engine,
            environment=build_environment(setup.rollout),
            tokenizer=tokenizer,
            rubric=rubric,
            prompts=prompts,
            held_out=held_out,
            client=connect_async(setup.data_plane, name=setup.name),
            journal=None if setup.journal is None else GroupJournal(setup.journal, setup.name),
        )

    # ---------------------------------------------------------------- engines that are actors of their own

    async def set_engines(self, engines: Sequence[tuple[str, Any]]) -> None:
        """Send requests to these EngineActors, (name, handle) each, and to no others; handles of built ones.

        Those that are there already stay as they are. Raises EngineDied naming the first that does not answer.
        """
        wanted = dict(engines)
        for name in set(self._router.names) - set(wanted):
            await self.remove_engine(name)
        await asyncio.gather(
            *(self.add_engine(name, handle) for name, handle in wanted.items() if name not in self._router.names)
        )

    async def add_engine(self, name: str, handle: Any) -> None:
        """Send requests to one more EngineActor, or to one that was left out. Raises EngineDied, ValueError when it is
        there already."""
        engine = RemoteEngine(name, handle)
        try:
            await engine.connect()
            await self._router.add(name, engine)
        except (EngineDied, ValueError):
            await engine.close()
            raise

    async def remove_engine(self, name: str, grace_s: float = 0.0) -> None:
        """Send nothing more to an engine; after `grace_s` its requests move to others. Unknown names are ignored: it
        may have been left out meanwhile."""
        if name in self._router.names:
            await (await self._router.remove(name, grace_s)).close()

    @property
    def _router(self) -> Router:
        engine = self._engine
        if not isinstance(engine, Router):
            raise RuntimeError(f"{self._name}: it embeds its engine, there is none to add or remove")
        return engine

    # ---------------------------------------------------------------- work

    async def rollout(
        self,
        positions: Sequence[int],
        partition: str,
        params: SamplingParams,
        fresh: bool = False,
        traced: bool = False,
    ) -> RolloutReport:
        """`RolloutWorker.rollout`."""
        return await self._built.rollout(positions, partition, params, fresh, traced)

    async def trim_journal(self, first: int, outstanding: Sequence[int]) -> None:
        """`RolloutWorker.trim_journal`."""
        await self._built.trim_journal(first, outstanding)

    async def end_rollouts(self) -> None:
        """`RolloutWorker.end_rollouts`."""
        self._built.end_rollouts()

    async def validate(self, start: int, count: int, params: SamplingParams) -> ValidationReport:
        """`RolloutWorker.validate`."""
        return await self._built.validate(start, count, params)

    async def close(self) -> None:
        """Close engine and worker. Engine actors go on running. Idempotent."""
        if self._hosted is not None:
            await self._hosted.close()
        if self._worker is not None:
            await self._worker.close()

    @property
    def _built(self) -> RolloutWorker:
        if self._worker is None:
            raise RuntimeError(f"{self._name}: not built yet (build comes first)")
        return self._worker
