"""The rollout actor: a Ray actor that hosts one rollout worker, built from plain data."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

from ..codecs import messages
from ..dataplane.factory import connect_async
from ..dataplane.handle import DataPlaneHandle
from .engines.factory import EngineConfig, build_engine
from .engines.protocol import SamplingParams
from .environments.factory import build_environment
from .prompts import DataConfig, PromptStream, check_prompt_lengths, open_source
from .protocols import ActorInfo
from .rewards.factory import RewardConfig, build_rubric
from .rollout import RolloutWorker
from .rollout_report import RolloutReport, ValidationReport
from .tokenizer import load_tokenizer
from .transports.factory import build_receiver
from .transports.protocol import WeightManifest

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
    """Of the order of finite prompt sources."""
    engine: EngineConfig
    environment: str
    tokenizer: str
    """Folder or hub id."""
    rewards: tuple[RewardConfig, ...]
    data: DataConfig
    validation: DataConfig | None
    max_prompt_tokens: int
    """Longer prompts are an error; looked for by the actor with `check_prompts`, in both sources."""
    check_prompts: bool
    transport: str
    """Weight transport's kind."""
    data_plane: DataPlaneHandle


class RolloutActor:
    """Hosts one RolloutWorker; an async Ray actor: `ray.remote(RolloutActor).options(...).remote(setup)`."""

    def __init__(self, setup: RolloutSetup) -> None:
        self._setup = setup
        self._worker: RolloutWorker | None = None

    async def info(self) -> ActorInfo:
        """Who this is; also shows that it answers."""
        return ActorInfo.here(self._setup.name)

    async def build(self) -> None:
        """Load tokenizer, model, prompts and rewards and join the data plane. Raises ValueError in one sentence.

        Apart from the constructor, whose errors Ray would bury in the actor's death.
        """
        self._worker = await asyncio.to_thread(self._build)

    def _build(self) -> RolloutWorker:
        setup = self._setup
        torch.set_num_threads(setup.threads)
        rubric = build_rubric(setup.rewards)
        tokenizer = load_tokenizer(setup.tokenizer)
        sources = [open_source(data, tokenizer) for data in (setup.data, setup.validation) if data is not None]
        if setup.check_prompts:
            for source in sources:
                check_prompt_lengths(source, tokenizer, setup.max_prompt_tokens)
        prompts = PromptStream(sources[0], seed=setup.seed)
        held_out = PromptStream(sources[1], shuffle=False, uid_prefix=VALIDATION_UID) if len(sources) > 1 else None
        return RolloutWorker(
            engine=build_engine(setup.engine),
            environment=build_environment(setup.environment),
            tokenizer=tokenizer,
            rubric=rubric,
            prompts=prompts,
            held_out=held_out,
            client=connect_async(setup.data_plane, name=setup.name),
            receiver=build_receiver(setup.transport),
        )

    async def rollout(self, start: int, count: int, partition: str, params: SamplingParams) -> RolloutReport:
        """`RolloutWorker.rollout`."""
        return await self._built.rollout(start, count, partition, params)

    async def validate(self, start: int, count: int, params: SamplingParams) -> ValidationReport:
        """`RolloutWorker.validate`."""
        return await self._built.validate(start, count, params)

    async def load_weights(self, manifest: bytes) -> int:
        """`RolloutWorker.load_weights` of an encoded WeightManifest."""
        return await self._built.load_weights(messages.decode(manifest, WeightManifest))

    async def version(self) -> int:
        """The policy version that the engine serves."""
        return self._built.version

    async def close(self) -> None:
        """Idempotent."""
        if self._worker is not None:
            await self._worker.close()

    @property
    def _built(self) -> RolloutWorker:
        if self._worker is None:
            raise RuntimeError(f"{self._setup.name}: not built yet (build comes first)")
        return self._worker
