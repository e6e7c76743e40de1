"""The rollout actor: a Ray actor that hosts one rollout worker, built from plain data.

It embeds its engine, or sends its prompts through a router to engine actors, whose handles the driver gives it.
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
from ..engines.protocol import EngineDied, GenerationEngine
from ..engines.router import Router
from ..engines.tokenizer import load_tokenizer
from ..environments.factory import build_environment
from ..remote_engine import RemoteEngine
from ..rewards.config import RewardFunctionConfig
from ..rewards.factory import build_rubric
from .config import DataConfig
from .journal import GroupJournal, JournalConfig
from .prompts import PromptStream, open_prompts
from .worker import RolloutWorker

VALIDATION_UID = "val-"
"""Prefix of the uids of held-out prompts. Those of the training stream are base 36 and never hold a hyphen."""


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """The plain data that a rollout actor is built from."""

    name: str
    """The actor's name in errors, traces and the data plane's status."""
    threads: int
    """Number of compute threads of the process."""
    seed: int
    """Seed of a generated task's prompts, and of the order in which a finite source is read."""
    engine: EngineConfig | None
    """Engine that is embedded; None when the engines are actors, which `set_engines` and `add_engine` bring."""
    rollout: RolloutConfig
    """Section `rollout`, of which the environment's keys are read here; the engine has its own copy."""
    tokenizer: str
    """Folder or hub id of the tokenizer."""
    rewards: tuple[RewardFunctionConfig, ...]
    """Reward functions that score every sample."""
    tagged_rewards: frozenset[str]
    """Labels of the rewards whose own values are tags of the rows, for advantages that need more than the total."""
    data: DataConfig
    """Section `data`: the source of prompts."""
    validates: bool
    """Whether this actor also opens the validation prompts."""
    check_prompts: bool
    """Whether this actor looks for prompts above `data.max_prompt_tokens` in both sources, where they are an error."""
    data_plane: DataPlaneHandle
    reward_timeout_s: float = 60.0
    """Seconds that the rewards of a row may take."""
    engine_timeout_s: float = 120.0
    """Seconds that a request waits for an engine actor when none is left."""
    journal: JournalConfig | None = None
    """Journal in which finished groups are kept; None when there is no journal."""


class RolloutActor(EngineHost):
    """Hosts one RolloutWorker; an async Ray actor: `ray.remote(RolloutActor).options(...).remote(setup)`."""

    def __init__(self, setup: RolloutSetup) -> None:
        super().__init__(setup.name)
        self._setup = setup
        self._worker: RolloutWorker | None = None
        self._data_notes: tuple[str, ...] = ()

    @property
    def worker(self) -> RolloutWorker:
        """The worker. Raises RuntimeError before `build`."""
        if self._worker is None:
            raise RuntimeError(f"{self._name}: not built yet (build comes first)")
        return self._worker

    def _target(self, method: str) -> object:
        """The actor for its own methods, else its worker."""
        return self if hasattr(self, method) else self.worker

    def _build(self) -> GenerationEngine:
        setup = self._setup
        torch.set_num_threads(setup.threads)
        rubric = build_rubric(setup.rewards, setup.tagged_rewards)
        tokenizer = load_tokenizer(setup.tokenizer)
        opened = open_prompts(
            setup.data, tokenizer, seed=setup.seed, validates=setup.validates, check_lengths=setup.check_prompts
        )
        self._data_notes = opened.notes
        prompts = PromptStream(opened.train, seed=setup.seed)
        held_out = None
        if opened.validation is not None:
            held_out = PromptStream(opened.validation, shuffle=False, uid_prefix=VALIDATION_UID)
        if setup.engine is None:
            engine = Router(timeout_s=setup.engine_timeout_s, on_left_out=lambda left: self.worker.note_left_out(left))
        else:
            engine = build_engine(setup.engine)
        self._hosted = engine  # so that `close` ends it when what follows fails
        self._worker = RolloutWorker(
            engine=engine,
            environment=build_environment(setup.rollout),
            tokenizer=tokenizer,
            rubric=rubric,
            prompts=prompts,
            held_out=held_out,
            client=connect_async(setup.data_plane, name=setup.name),
            journal=None if setup.journal is None else GroupJournal(setup.journal, setup.name),
            reward_timeout_s=setup.reward_timeout_s,
        )
        return engine

    def data_notes(self) -> tuple[str, ...]:
        """Return sentences for the user about the prompts that `build` opened: what was chosen or left out."""
        return self._data_notes

    # ---------------------------------------------------------------- engines that are actors of their own

    async def set_engines(self, names: Sequence[str], handles: Sequence[Any]) -> None:
        """Send requests to these EngineActors, which are built, and to no others. handles: Ray's, in order of `names`.

        Engines that are there already stay as they are. Raises EngineDied naming the first that does not answer.
        """
        wanted = dict(zip(names, handles, strict=True))
        for name in set(self._router.names) - set(wanted):
            await self.remove_engine(name)
        await asyncio.gather(
            *(self.add_engine(name, handle) for name, handle in wanted.items() if name not in self._router.names)
        )

    async def add_engine(self, name: str, handle: Any) -> None:
        """Send requests to one more EngineActor, or again to one that was left out.

        Raises EngineDied when it does not answer, ValueError when it is there already.
        """
        engine = RemoteEngine(name, handle)
        try:
            await engine.connect()
            await self._router.add(name, engine)
        except (EngineDied, ValueError):
            await engine.close()
            raise

    async def remove_engine(self, name: str, grace_s: float = 0.0) -> None:
        """Send nothing more to an engine; after `grace_s` seconds its requests move to others.

        Unknown names are ignored, as the engine may have been left out meanwhile.
        """
        if name in self._router.names:
            await (await self._router.remove(name, grace_s)).close()

    @property
    def _router(self) -> Router:
        engine = self._engine
        if not isinstance(engine, Router):
            raise RuntimeError(f"{self._name}: it embeds its engine, there is none to add or remove")
        return engine

    async def progress(self) -> int:
        """Number that changes whenever the engine or the worker gets on. Raises EngineDied when the engine is gone."""
        return self._engine.progress + self.worker.progress

    # ---------------------------------------------------------------- the end

    async def close(self) -> None:
        """Close the worker and the engine that is embedded. Engine actors go on running. Idempotent."""
        if self._hosted is not None:
            await self._hosted.close()
        if self._worker is not None:
            await self._worker.close()
