"""`RolloutActor`, the Ray actor that hosts one rollout worker and is built from plain data.

The actor runs its engine in its own process, or sends its prompts through a router to engine actors, whose Ray handles
the driver gives it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...dataplane.factory import connect_async
from ...dataplane.handle import DataPlaneHandle
from ...dataplane.imports import MissingExtra
from ..engine_actor import EngineHost, RemoteEngine
from ..engines.chat import ChatFormat, build_chat_format
from ..engines.config import ModelConfig
from ..engines.factory import EngineConfig, build_engine
from ..engines.protocol import EngineDied, ServingEngine
from ..engines.router import Router, Suspension
from ..engines.stop_tokens import end_note, end_tokens
from ..engines.tokenizer import load_tokenizer
from ..environments.config import EndpointConfig, EnvironmentConfig
from ..environments.factory import SingleTurn, build_environment, build_host, recovery_mode
from ..rewards.config import RewardConfig
from ..rewards.rubric import build_rubric
from ..sample_file import SampleFile
from .data_config import DataConfig
from .journal import GroupJournal, JournalConfig, KnownGroups
from .pictures.picture_rows import RowPictures, open_pictures
from .prompts import AddedTokens, PromptStream, no_tokens, open_prompts
from .rows import MaskRules, RouteRules, TeacherSources
from .supervised.config import SftConfig
from .supervised.supervised_rows import SupervisedRows
from .turn_journal import TurnJournal
from .worker import HeldOut, RolloutWorker


@dataclass(frozen=True, slots=True)
class EvaluationSetup:
    """Settings from which a rollout actor prepares one evaluation."""

    name: str
    """Unique name of the evaluation."""
    prefix: str
    """First part of the evaluation's metric keys and of its prompts' uids. Uids of training prompts are base-36
    numbers, which never contain a hyphen."""
    data: DataConfig
    """Sources of prompts; the evaluation reads the validation source."""
    num_prompts: int | None
    """Largest number of prompts of an evaluation. None: all prompts of the source, which must then be finite."""
    reward: RewardConfig
    """Reward functions that score the samples."""
    correct: str | None
    """Rule by which a sample counts as correct; see `FigureScheme`."""


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """Settings from which a rollout actor is built, as plain data that can be sent to its process."""

    name: str
    """Name of the actor in errors, traces and the data plane's status."""
    threads: int
    """Number of CPU threads for torch operations in the actor's process (`torch.set_num_threads`)."""
    seed: int
    """Seed of a generated task's prompts, and of the order in which a finite source is read."""
    engine: EngineConfig | None
    """Engine that the actor runs in its own process. None when the engines are separate actors, which `set_engines` and
    `add_engine` supply."""
    endpoint: EndpointConfig
    """Section `rollout.endpoint` of the configuration: the endpoint through which agents speak to the policy."""
    environment: EnvironmentConfig
    """Section `environment` of the configuration: the environment that the policy acts in."""
    model: ModelConfig
    """Section `model` of the configuration, whose keys for the chat format are read here."""
    tokenizer: str
    """Folder or hub id of the tokenizer."""
    reward: RewardConfig
    """Section `reward` of the configuration: the rubric that scores every sample."""
    data: DataConfig
    """Section `data` of the configuration: the sources of prompts."""
    evaluations: tuple[EvaluationSetup, ...]
    """Evaluations that this actor takes part in, including validation."""
    check_prompts: bool
    """True if this actor checks the training and evaluation prompts for more than `data.max_prompt_tokens` tokens. A
    longer prompt is an error, except where `data.overlong_prompts=drop` leaves such prompts out."""
    data_plane: DataPlaneHandle
    mask_truncated: bool = False
    """True if samples that were cut off at the largest number of new tokens are not trained on
    (`algorithm.mask_truncated`)."""
    keeps_old_kv: bool = False
    """True if requests that continue after a weight update keep their keys and values (`sync.kv`)."""
    engine_timeout_s: float = 120.0
    """Seconds that a request waits for an available engine actor before it fails."""
    prefix_routing: bool = True
    """True if the choice of an engine actor depends on the prompts that it has cached (`rollout.routing`)."""
    samples: SampleFile | None = None
    """File of episodes for people to read; None writes no file."""
    journal: JournalConfig | None = None
    """Settings of the journal, which keeps finished groups (all rows of one prompt) on disk; None when there is no
    journal."""
    routes: RouteRules | None = None
    """Rules for the expert routes in rows; None without router replay."""
    masks: MaskRules | None = None
    """Rules for the sampling masks in rows; None for a run without masks."""
    sft: SftConfig | None = None
    """Section `sft` of the configuration, for an actor that supplies the rows of a supervised run; else None."""
    adapters: bool = False
    """True if the policy is an adapter beside a model that does not change."""
    teachers: TeacherSources | None = None
    """Data sources that have teachers of their own; None if no source has."""


class RolloutActor(EngineHost):
    """Asynchronous Ray actor that hosts one RolloutWorker. It is created by
    `ray.remote(RolloutActor).options(...).remote(setup)`."""

    def __init__(self, setup: RolloutSetup) -> None:
        super().__init__(setup.name)
        self._setup = setup
        self._worker: RolloutWorker | None = None
        self._data_notes: tuple[str, ...] = ()
        self._pictures: RowPictures | None = None

    @property
    def worker(self) -> RolloutWorker:
        """The hosted rollout worker. Raises RuntimeError before `build`."""
        if self._worker is None:
            raise RuntimeError(f"{self._name}: the worker is not built yet (build comes first)")
        return self._worker

    def _target(self, method: str) -> object:
        """Return the object on which `call` runs `method`. Methods of the worker run on the worker, all others on this
        actor or its engine."""
        of_worker = hasattr(RolloutWorker, method) and not hasattr(self, method)
        return self.worker if of_worker else super()._target(method)

    def _build(self) -> ServingEngine:
        setup = self._setup
        torch.set_num_threads(setup.threads)
        rubric = build_rubric(setup.reward)
        tokenizer = load_tokenizer(setup.tokenizer)
        pictures = self._pictures = open_pictures(setup.data, setup.model.path, setup.tokenizer, tokenizer)
        added = no_tokens if pictures is None else pictures.pool.processor.added_tokens
        prompts, journal = self._open_rows(tokenizer, added)
        self._data_notes += () if pictures is None else (pictures.pool.processor.note,)
        environment = build_environment(setup.environment)
        held_out = {
            evaluation.name: self._open_evaluation(evaluation, tokenizer, added) for evaluation in setup.evaluations
        }
        if setup.engine is None:
            engine = Router(
                timeout_s=setup.engine_timeout_s,
                prefixes=setup.prefix_routing,
                on_left_out=lambda left: self.worker.note_left_out(left),
            )
        else:
            engine = build_engine(setup.engine)
        self._hosted = engine  # From here on, `close` ends the engine even if the next lines fail.
        self._worker = RolloutWorker(
            engine=engine,
            environment=build_host(
                environment,
                setup.environment,
                setup.endpoint,
                adapters=setup.adapters,
                chat=self._chat(tokenizer),
                max_prompt_tokens=setup.data.max_prompt_tokens,
                columns=setup.data.columns,
                pictures=pictures.pool if pictures else None,
            ),
            tokenizer=tokenizer,
            rubric=rubric,
            prompts=prompts,
            held_out=held_out,
            client=connect_async(setup.data_plane, name=setup.name),
            journal=journal,
            turns=self._open_turns(environment, journal),
            reward_timeout_s=setup.reward.timeout_s,
            mask_truncated=setup.mask_truncated,
            keeps_old_kv=setup.keeps_old_kv,
            routes=setup.routes,
            masks=setup.masks,
            samples=setup.samples,
            max_rows=setup.environment.max_rows,
            columns=setup.data.columns,
            teachers=setup.teachers,
            pictures=pictures,
            on_failure=setup.environment.on_failure,
            retries=setup.environment.retries,
            name=setup.name,
        )
        return engine

    def _open_rows(self, tokenizer: Any, added: AddedTokens) -> tuple[PromptStream, KnownGroups | None]:
        """Open the source of prompts and the journal, or the rows of a supervised run."""
        setup = self._setup
        if setup.sft is not None:
            images = setup.data.images
            rows = SupervisedRows(setup.sft, tokenizer, setup.tokenizer, seed=setup.seed, images=images, added=added)
            return rows.prompts, rows
        opened = open_prompts(setup.data, tokenizer, seed=setup.seed, check_lengths=setup.check_prompts, added=added)
        note = end_note(end_tokens(setup.tokenizer, tokenizer), tokenizer)
        self._data_notes = (*opened.notes, *([note] if note else []))
        journal = None if setup.journal is None else GroupJournal(setup.journal, setup.name)
        return PromptStream(opened.source, seed=setup.seed, rates=opened.rates), journal

    def _open_evaluation(self, setup: EvaluationSetup, tokenizer: Any, added: AddedTokens) -> HeldOut:
        """Open the prompts of an evaluation, and build its rubric. Raises ValueError, naming the evaluation, if the
        prompts or the rubric are not valid."""
        try:
            opened = open_prompts(
                setup.data,
                tokenizer,
                seed=self._setup.seed,
                check_lengths=self._setup.check_prompts,
                held_out=setup.name,
                added=added,
            )
            rubric = build_rubric(setup.reward, voter=setup.correct)
        except MissingExtra:
            raise
        except ValueError as error:
            raise ValueError(f"{setup.name}: {error}") from error
        self._data_notes += opened.notes
        sizes = [size for size in (setup.num_prompts, opened.source.size) if size is not None]
        prompts = PromptStream(opened.source, shuffle=False, uid_prefix=f"{setup.prefix.replace('/', '-')}-")
        return HeldOut(prompts, min(sizes), rubric, setup.reward.timeout_s, setup.prefix, setup.correct)

    def _open_turns(self, environment: Any, journal: KnownGroups | None) -> TurnJournal | None:
        """Open the journal of turns. None if the run keeps no journal, or has no turns to record."""
        setup, config = self._setup, self._setup.environment
        if setup.journal is None or not isinstance(journal, GroupJournal) or journal.purpose == "replay":
            return None
        mode = recovery_mode(config, environment)
        if mode != config.recover:
            self._data_notes += (f"environment.recover={mode}, because {config.kind} cannot be played again",)
        if mode == "restart" or (mode == "turn" and isinstance(environment, SingleTurn)):
            return None
        piece_tokens = config.recover_tokens if mode == "prefix" else 0
        return TurnJournal(setup.journal, setup.name, journal, piece_tokens)

    def _chat(self, tokenizer: Any) -> Callable[[], ChatFormat]:
        model, options = self._setup.model, self._setup.data.chat_template_kwargs
        return functools.cache(lambda: build_chat_format(tokenizer, model.renderer, model.renderer_options, options))

    def data_notes(self) -> tuple[str, ...]:
        """Return sentences for the user about the prompt sources that `build` opened, and about the ends of answers.
        For example, they name the split that was chosen and the number of prompts left out."""
        return self._data_notes

    # ---------------- These methods manage engine actors, and end the parts of this actor.

    async def set_engines(self, names: Sequence[str], handles: Sequence[Any]) -> None:
        """Send requests to exactly these engine actors. `build` must have been called on each of them. handles: Ray
        handles in the order of `names`.

        Engines that are already in use stay in use. Raises EngineDied, which names the engine, if one of them does not
        answer.
        """
        wanted = dict(zip(names, handles, strict=True))
        for name in set(self._router.members) - set(wanted):
            await self.remove_engine(name)
        await asyncio.gather(
            *(self.add_engine(name, handle) for name, handle in wanted.items() if name not in self._router.members)
        )

    async def add_engine(self, name: str, handle: Any) -> None:
        """Start sending requests to one more engine actor. It may be one that was removed from routing before. handle:
        its Ray handle.

        Raises EngineDied if the engine does not answer, and ValueError if an engine of this name is already in use.
        """
        engine = RemoteEngine(name, handle)
        try:
            await engine.connect()
            self._router.add(name, engine)
        except (EngineDied, ValueError):
            await engine.close()
            raise

    async def remove_engine(self, name: str, grace_s: float = 0.0) -> None:
        """Stop sending requests to an engine. Its requests that are not answered after `grace_s` seconds move to other
        engines.

        Unknown names are ignored, because the engine may have been removed from routing in the meantime.
        """
        if name in self._router.members:
            await (await self._router.remove(name, grace_s)).close()

    async def retire_engine(self, name: str) -> None:
        """Stop sending requests to an engine that leaves the run. Its requests continue on other engines. See
        `Router.retire`."""
        if (engine := await self._router.retire(name)) is not None:
            await engine.close()

    async def suspend_engine(self, name: str, cut: bool) -> Suspension:
        """Stop sending requests to an engine until `readmit_engine`, and wait for its requests in flight. See
        `Router.suspend`."""
        return await self._router.suspend(name, cut=cut)

    async def readmit_engine(self, name: str, handle: Any) -> None:
        """Send requests to a suspended engine again, or to another one that has taken its place. handle: its Ray
        handle. Raises EngineDied if a new engine does not answer."""
        if name in self._router.members:
            self._router.readmit(name)
        else:
            await self.add_engine(name, handle)

    @property
    def _router(self) -> Router:
        engine = self._engine
        if not isinstance(engine, Router):
            raise RuntimeError(f"{self._name}: this actor runs its engine itself, so no engine can be added or removed")
        return engine

    async def progress(self) -> int:
        """Return a number that changes whenever the engine or the worker makes progress. It distinguishes a slow actor
        from one that hangs. Raises EngineDied if the engine is known to have died."""
        return self._engine.progress + self.worker.progress

    async def close(self) -> None:
        """Close the worker, and the engine if it runs in this process. Engine actors keep running. Idempotent."""
        if self._hosted is not None:
            await self._hosted.close()
        if self._worker is not None:
            await self._worker.close()
        elif self._pictures is not None:  # The rest of `build` failed.
            await self._pictures.pool.close()
