"""Protocols of a generation engine: `Generator` samples, `WeightHost` takes new weights, `Sleeper` pauses and sleeps.

A caller asks for the narrowest of them that it needs; `GenerationEngine` is all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from ..weights.transports.protocol import WeightUpdate

PauseMode = Literal["keep", "wait", "abort"]
"""Treatment of requests in flight during a pause: `keep` freezes them, and they go on after `resume`; `wait` lets them
end first; `abort` ends them at once with the tokens made so far (finish_reason `abort`)."""

SESSION_SEPARATOR = "/"
"""Separates session and turn in a request id, `{session}` or `{session}/{turn}`. All turns of a session go to one
engine, whose prefix cache holds the earlier ones."""


def expect_pause_mode(mode: str) -> None:
    """Raise ValueError unless `mode` is a PauseMode."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"pause mode: got {mode!r}, expected one of {', '.join(get_args(PauseMode))}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. Reported log-probs are those of the distribution that is sampled from, with
    temperature, top-p and top-k applied."""

    n: int = 1
    """Number of completions."""
    max_new_tokens: int = 16
    """Most tokens that a completion may have."""
    temperature: float = 1.0
    """Sampling temperature; 0.0 decodes greedily."""
    top_p: float = 1.0
    """Probability mass that nucleus sampling keeps; 1.0 keeps all."""
    top_k: int = 0
    """Number of most likely tokens that sampling keeps; 0 keeps all."""
    seed: int | None = None
    """Seed of the request's random numbers; None uses the engine's own seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, in addition to the model's own end tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, wherever they fall in its tokens. The tokens that complete such a text are kept."""

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("n", self.n >= 1, "at least 1"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("stop", all(self.stop), "texts that are not empty"),
        ):
            if not fits:
                raise ValueError(f"sampling {name}: got {getattr(self, name)}, expected {expected}")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation."""

    token_ids: np.ndarray
    """Token ids of the response alone, int32 `[T]`. The stop token is the last one when finish_reason is `stop`."""
    logprobs: np.ndarray
    """Log-prob of each token, float32 `[T]`."""
    finish_reason: str
    """Reason why the completion ended: `stop`, `length` or `abort` (partial output)."""
    versions: np.ndarray
    """Policy version that produced each token, int32 `[T]`; never falls from one token to the next."""

    @staticmethod
    def empty() -> Completion:
        """Make the completion of a request that was aborted before its first token."""
        return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", np.zeros(0, np.int32))


@dataclass(slots=True)
class EngineStats:
    """Counters of what an engine has done since it started; they grow in place."""

    batches: int = 0
    """Number of batches decoded (`hf`) or requests answered (other engines)."""
    rows: int = 0
    """Number of completions returned."""
    tokens: int = 0
    """Number of response tokens returned."""
    busy_s: float = 0.0
    """Seconds during which the engine was generating."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """Cost of switching an engine to a new version of the weights."""

    version: int
    """Version that the engine serves now."""
    pause_s: float
    """Seconds until the engine could make no more tokens with the old version."""
    load_s: float
    """Seconds that loading the staged bytes into the parameters took; with `staging: none` also their transfer."""
    kept: int
    """Number of requests in flight that went on under the new weights."""
    aborted: int
    """Number of requests that the commit ended."""


class EngineBroken(RuntimeError):
    """The engine no longer holds a whole version of the weights, because a commit without staging failed half way. It
    refuses to generate until a later version is committed whole."""


class EngineDied(RuntimeError):
    """The process that hosts an engine is gone or no longer answers. The message names it and says what is known."""


class Generator(Protocol):
    """Turns prompt token ids into sampled completions: all that an environment or a rollout worker needs of an engine.

    Methods are asynchronous and requests run concurrently.
    """

    @property
    def version(self) -> int:
        """Policy version that the next token is sampled with."""
        ...

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return `params.n` completions, in order. The engine batches concurrent calls.

        request_id: must be unique among the requests in flight. Raises ValueError naming the lengths when prompt +
        max_new_tokens exceed the context, or for an id in flight; EngineBroken; RuntimeError when asleep or closed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request: its `generate` call returns the tokens made so far, with finish_reason `abort`. Unknown ids
        are ignored."""
        ...


class WeightHost(Protocol):
    """Serves one version of the weights and takes the next: all that a weight update needs of an engine."""

    @property
    def version(self) -> int:
        """Version of the weights that are served."""
        ...

    @property
    def num_workers(self) -> int:
        """Number of the engine's processes that receive weights: tp for vllm, 1 for engines in this process."""
        ...

    async def prepare_weights(self, update: WeightUpdate) -> None:
        """Receive and verify `update`; the engine goes on serving the old version, and nothing else changes.

        Raises WeightTransferError (what was staged is dropped), or ValueError naming missing, unknown or misshapen
        parameters or a version that is not above the current one. An engine without room for a second copy
        (`staging: none`) only joins the transfer here and receives in `commit_weights`.
        """
        ...

    async def commit_weights(self, version: int, in_flight: PauseMode = "wait") -> CommitReport:
        """Serve the prepared `version`: pause, replace all parameters, forget cached prefixes, resume. Every token made
        from then on carries `version`, also those of requests that were kept.

        Raises ValueError when `version` is not the prepared one. Without staging it may raise WeightTransferError; the
        engine is then broken (EngineBroken) until a later commit.
        """
        ...

    async def drop_weights(self, version: int) -> None:
        """Forget a prepared version, or end its reception. Idempotent; the engine goes on serving the current one."""
        ...


class Sleeper(Protocol):
    """Stands still on request, and gives its memory back while it sleeps."""

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Make no token between this call's return and `resume`; requests that come meanwhile wait. See PauseMode."""
        ...

    async def resume(self) -> None:
        """Go on generating. Idempotent."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget cached keys and values of earlier prompts. Requests in flight are not harmed."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Give memory back: level 1 keeps the weights in host memory, level 2 drops them (commit a version after
        `wake`). Idempotent. Platforms that cannot give memory back only stop taking requests."""
        ...

    async def wake(self) -> None:
        """Undo `sleep`. Idempotent."""
        ...


class GenerationEngine(Generator, WeightHost, Sleeper, Protocol):
    """A whole engine, as the actor that hosts it sees it."""

    @property
    def stats(self) -> EngineStats:
        """Counters of what the engine has done since it started."""
        ...

    @property
    def progress(self) -> int:
        """Number that changes whenever the engine makes tokens, also those of requests that it has not answered yet.

        Raises EngineDied when the engine's own process is known to be gone.
        """
        ...

    async def close(self) -> None:
        """End the engine. Requests in flight raise an error or return the tokens made so far. Idempotent."""
        ...
