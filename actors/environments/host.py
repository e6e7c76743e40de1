"""`EpisodeHost` plays the episodes of prompts with an environment, and bounds their number and their time.

prompt -> n episodes -> Gate (so many at once) -> environment.play(episode), a task of its own -> samples
             ^                                        |  an error, or no time left
             |                                        +--> this episode has failed, the others continue
             +------------- played again, where `environment.on_failure` says `retry` ----+
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..columns import ColumnConfig
from ..engines.chat import ChatFormat
from ..engines.protocol import Generator, SamplingParams
from ..engines.router import Router
from ..engines.token_sampling import ContextExceeded
from ..failures import FailureKind, FailureStopsRun, kind_of_error
from ..process.user_errors import awaited, described
from ..process.user_function_timeouts import MAX_HUNG, TooManyHang, UserThreads
from ..protocols import Prompt, Sample
from .config import EnvironmentConfig
from .episode import Clock, EndpointAddress, Episode, EpisodeServices, OutOfTokens
from .recovery import RecoveringEngine, TurnRecord

if TYPE_CHECKING:
    from ..images.preparation import PicturePool  # It imports transformers, which takes seconds.

GRACE_S = 5.0
"""Seconds that an environment has to end a cancelled episode. After that, the episode counts as hanging and is no
longer awaited."""
RETRY_WAIT_S, LONGEST_RETRY_WAIT_S = 1.0, 30.0
"""Seconds before an episode whose sandbox failed is played again for the first time, and the longest such wait. Each
wait is twice as long as the one before."""
NUM_THREADS = 64
"""Largest number of blocking functions of environments that run in threads at the same time in a rollout actor."""


_DEFAULTS = EnvironmentConfig()


class Gate:
    """Limits the number of episodes that run at the same time, in proportion to the engines that can answer.

    With half of the engines gone, half as many episodes may run. Episodes that already run continue, and one episode
    may always run.
    """

    def __init__(self, most: int) -> None:
        """most: largest number of episodes when all engines can answer."""
        self._most = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.running = 0
        """Number of episodes that run now."""

    def allowed(self, engine: Generator) -> int:
        """Return how many episodes may run now."""
        share = engine.available_share if isinstance(engine, Router | RecoveringEngine) else 1.0
        return max(1, int(self._most * share))

    @asynccontextmanager
    async def place(self, engine: Generator) -> AsyncIterator[None]:
        """Context manager for one episode; waits until the episode may begin. Episodes begin in the order of the
        calls: none overtakes another that waits."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._fill(engine)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # `_fill` drops cancelled turns.
                self._leave(engine)
            raise
        try:
            yield
        finally:
            self._leave(engine)

    def _leave(self, engine: Generator) -> None:
        self.running -= 1
        self._fill(engine)

    def _fill(self, engine: Generator) -> None:
        """Give the free places to the episodes that wait. An episode has its place before it goes on, so that another
        one that comes meanwhile cannot take it."""
        while self._waiting and self.running < self.allowed(engine):
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)


class _Turns:
    """Keeps the answers of the engine in the attempts at an episode (a `TurnLog`)."""

    def __init__(self) -> None:
        self.records: list[TurnRecord] = []

    async def write(self, record: TurnRecord) -> None:
        self.records.append(record)


class EpisodeEndpoint(Protocol):
    """Protocol of an endpoint through which the agents of episodes call the policy."""

    async def open(self, episode: Episode) -> EndpointAddress:
        """Let the agent of an episode call the policy, and return the address for these calls."""
        ...

    async def end(self, episode: Episode) -> None:
        """Refuse further calls of the episode, and end those in flight. Idempotent."""
        ...

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        ...


class EpisodeHost:
    """Plays all episodes of a prompt with one environment (a `GroupPlayer`). Calls may run concurrently."""

    def __init__(
        self,
        environment: Any,
        config: EnvironmentConfig = _DEFAULTS,
        *,
        chat: Callable[[], ChatFormat] | None = None,
        max_prompt_tokens: int = 1 << 30,
        endpoint: EpisodeEndpoint | None = None,
        columns: Sequence[ColumnConfig] = (),
        pictures: PicturePool | None = None,
    ) -> None:
        """environment: an object with a coroutine `play` or `play_group` (see `Environment`). chat: function that
        returns the model's chat format; None if the model has no chat format. max_prompt_tokens: see EpisodeServices.
        endpoint: endpoint through which agents call the policy; None if the run has no endpoint. It is closed with the
        host. columns: columns that environments may set (`data.columns`). pictures: see EpisodeServices."""
        self._columns = tuple(columns)
        self._pictures = pictures
        self._environment = environment
        self._config = config
        self._chat = chat or _no_chat
        self._max_prompt_tokens = max_prompt_tokens
        self._endpoint = endpoint
        self._threads = UserThreads("environments", NUM_THREADS)
        self._gate = Gate(self._config.max_episodes)
        self._hung: set[asyncio.Task[Any]] = set()

    @property
    def environment(self) -> Any:
        """The environment that plays the episodes."""
        return self._environment

    async def run(self, prompt: Prompt, engine: Generator, tokenizer: Any, params: SamplingParams) -> list[Sample]:
        """Play `params.n` episodes of the prompt and return their samples, in order.

        If the environment raises an error or takes too long in an episode, only that episode fails; with `play_group`,
        all episodes of the prompt fail together. An episode that failed is played again if `environment.on_failure`
        says so. Errors of the engine are raised, unless their type is in EPISODE_ERRORS. Raises TooManyHang if too many
        episodes or blocking functions hang, and FailureStopsRun for a failure that is to end the run.
        """
        most, columns = self._max_prompt_tokens, self._columns
        services = EpisodeServices(engine, tokenizer, self._chat, self._threads, most, columns, self._pictures)
        own, indices = replace(params, n=1), range(params.n)

        def begin(part: Sequence[int], answers: Generator) -> list[Episode]:
            clock = Clock(self._config.turn_timeout_s, self._config.episode_timeout_s)
            shared = replace(services, engine=answers)
            return [Episode(prompt, index, own, shared, clock) for index in part]

        parts = [indices] if hasattr(self._environment, "play_group") else [[index] for index in indices]
        tasks = [asyncio.create_task(self._play_until_settled(partial(begin, part), engine)) for part in parts]
        try:
            return [sample for samples in await asyncio.gather(*tasks) for sample in samples]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close the endpoint, and the environment if it has a method `close`. Idempotent."""
        if self._endpoint is not None:
            await self._endpoint.close()
        close = getattr(self._environment, "close", None)
        if close is not None:
            async with asyncio.timeout(2 * GRACE_S):
                await awaited(close)

    # ---------------- These methods are private.

    async def _play_until_settled(self, begin: Callable[[Generator], list[Episode]], engine: Generator) -> list[Sample]:
        """Play the episodes that `begin` makes, and return their samples. Episodes that failed and may be played again
        are replaced by new ones.

        The turns of the earlier attempts answer again, unless the environment cannot be played again. Otherwise turns
        would be drawn until some avoid the failure, and those that do not would be missing among the rows.
        """
        wait_s, turns = RETRY_WAIT_S, _Turns()
        for retries in itertools.count():
            records = () if getattr(self._environment, "recover", None) == "restart" else tuple(turns.records)
            episodes = begin(RecoveringEngine(engine, turns, records))
            for episode in episodes:
                episode.retries = retries
            await self._play(episodes, engine)
            samples = [episode.finish(self._config.max_rows, partial=self._keeps_partial) for episode in episodes]
            failed = next((sample for sample in samples if sample.failure), None)
            if failed is None or failed.failure is None:
                return samples
            treatment = self._config.on_failure.treatments[failed.failure]
            if treatment == "stop":
                raise FailureStopsRun(failed.failure, f"prompt {failed.prompt.uid!r}: {failed.error}")
            if treatment != "retry" or retries >= self._config.retries:
                return samples
            if failed.failure == "sandbox":  # A container or server that is just starting again needs a while.
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_RETRY_WAIT_S)
        raise AssertionError("unreachable: the last attempt returns or raises")

    @property
    def _keeps_partial(self) -> bool:
        return self._config.on_failure.limit == "partial"

    async def _play(self, episodes: Sequence[Episode], engine: Generator) -> None:
        async with self._gate.place(engine):
            if len(self._hung) >= MAX_HUNG:
                raise TooManyHang(
                    f"environments: {len(self._hung)} cancelled episodes have not ended within {GRACE_S:g} s"
                )
            first = episodes[0]
            if self._endpoint is not None:
                for episode in episodes:
                    episode.address = await self._endpoint.open(episode)
            first.clock.restart()
            task = asyncio.create_task(self._call(episodes))
            try:
                while not task.done():
                    left_s = first.clock.left_s
                    if left_s <= 0.0:
                        break
                    await asyncio.wait({task}, timeout=left_s)
                if not task.done():
                    words = first.clock.exceeded
                    await self._stop(task)
                    for episode in episodes:
                        self._end(episode, f"TimeoutError: {words}", "limit", "timeout")
                    return
                self._take(task, episodes)
            finally:
                try:
                    if not task.done() and task not in self._hung:
                        await self._stop(task)
                    elif task.done() and not task.cancelled():
                        task.exception()  # A cancellation that came with the error would leave it unread (see `_stop`).
                finally:
                    await self._end_sessions(episodes)

    async def _end_sessions(self, episodes: Sequence[Episode]) -> None:
        if self._endpoint is not None:
            for episode in episodes:
                await self._endpoint.end(episode)

    async def _call(self, episodes: Sequence[Episode]) -> Any:
        if hasattr(self._environment, "play_group"):
            return await awaited(self._environment.play_group, episodes)
        [episode] = episodes
        save, load = (getattr(self._environment, name, None) for name in ("save", "load"))
        if callable(save) and callable(load):
            state = await episode.rebuild()
            if state is not None:
                await awaited(_load, load, episode, state)
            episode.save_state = save
        return await awaited(getattr(self._environment, "play", self._environment), episode)

    def _take(self, task: asyncio.Task[Any], episodes: Sequence[Episode]) -> None:
        """Record what the environment returned or raised. Raises errors that end the rollout."""
        fatal = next((episode.fatal for episode in episodes if episode.fatal is not None), None)
        engine_error = next((episode.engine_error for episode in episodes if episode.engine_error is not None), None)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if fatal is not None:
            raise fatal
        if error is None:
            given = task.result()
            if inspect.isawaitable(given) or (given is not None and len(episodes) == 1 and isinstance(given, str)):
                error = TypeError(f"the environment returned {type(given).__name__}, expected a reward or None")
            elif given is not None:
                rewards = given if len(episodes) > 1 else [given]
                try:
                    for episode, reward in zip(episodes, rewards, strict=True):
                        episode.reward(reward)
                except (TypeError, ValueError) as wrong:
                    error = wrong
        for episode in episodes:
            if isinstance(error, OutOfTokens) or (error is not None and episode.out_of_tokens):
                episode.finish_reason = "length"
            elif error is not None:
                kind = kind_of_error(error)
                if engine_error is not None:  # An agent can have hidden it behind an error of its own.
                    kind = "limit" if isinstance(engine_error, ContextExceeded) else "engine"
                self._end(episode, described(error), kind, "length")

    def _end(self, episode: Episode, error: str, kind: FailureKind, reason: str) -> None:
        """Record that an episode failed. One that exceeded a limit may keep its rewards and have a finish reason."""
        if kind == "limit" and self._keeps_partial:
            episode.finish_reason = reason
        else:
            episode.fail(error, kind)

    async def _stop(self, task: asyncio.Task[Any]) -> None:
        """Cancel the environment's task. A task that does not end within GRACE_S is no longer awaited, and counts as
        hanging until it ends."""
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)
        if not task.done():
            self._hung.add(task)
            task.add_done_callback(self._ended_late)
        elif not task.cancelled():
            task.exception()  # Reading the exception marks it as retrieved, so that asyncio does not report it.

    def _ended_late(self, task: asyncio.Task[Any]) -> None:
        self._hung.discard(task)
        if not task.cancelled():
            task.exception()


async def _load(load: Callable[[Episode, Any], Any], episode: Episode, state: Any) -> None:
    given = load(episode, state)
    if inspect.isawaitable(given):
        await given


def _no_chat() -> ChatFormat:
    raise ValueError(
        "the environment speaks to the policy in chat messages, but this host of environments has no chat format"
    )
