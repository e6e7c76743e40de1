"""What a generation engine is: sampling, pausing in flight, and weights that change version by version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from ..weights.transports.protocol import WeightUpdate

PauseMode = Literal["keep", "wait", "abort"]
"""What happens to requests in flight: `keep` freezes them where they are, and they go on after `resume`; `wait` lets
them end first; `abort` ends them now, with what they have (finish_reason `abort`)."""

SESSION_SEPARATOR = "/"
"""A request id is `{session}` or `{session}/{turn}`: its turns go to one engine, whose prefix cache has them."""


def expect_pause_mode(mode: str) -> None:
    """Raises ValueError unless `mode` is a PauseMode."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"pause mode: got {mode!r}, expected one of {', '.join(get_args(PauseMode))}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Log-probs reported are of the distribution sampled from (temperature, top-p, top-k applied)."""

    n: int = 1
    max_new_tokens: int = 16
    temperature: float = 1.0
    """0.0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    seed: int | None = None
    """None: the engine's own."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, wherever they fall in its tokens; the tokens that complete one stay."""

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
    """int32 `[T]`: the response only; ends with the stop token when finish_reason is `stop`."""
    logprobs: np.ndarray
    """float32 `[T]`."""
    finish_reason: str
    """`stop`, `length` or `abort` (partial output)."""
    versions: np.ndarray
    """int32 `[T]`: policy version that produced each token; never falls."""


@dataclass(slots=True)
class EngineStats:
    """What an engine has done since it started; counters grow in place."""

    batches: int = 0
    rows: int = 0
    """Completions returned."""
    tokens: int = 0
    """Response tokens."""
    busy_s: float = 0.0
    """Seconds in which something was generated."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What serving a new version took."""

    version: int
    pause_s: float
    """Until no token of the old version could be made any more."""
    load_s: float
    """From staged bytes to the engine's parameters; with `staging: none` the transfer, too."""
    kept: int
    """Requests that went on under the new weights."""
    aborted: int
    """Requests that were ended for it."""


class EngineBroken(RuntimeError):
    """The engine has no whole version of the weights any more (a commit without staging failed in the middle): it
    refuses to generate until a later version is committed whole."""


class EngineDied(RuntimeError):
    """The process that hosts an engine is gone, or does not answer any more; names it and says what is known."""


class GenerationEngine(Protocol):
    """Turns prompt token ids into completions under the current policy version. Async: requests run concurrently."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """`params.n` completions, in order. Concurrent calls are batched by the engine.

        request_id: unique among those in flight. Raises ValueError naming the lengths when prompt + max_new_tokens
        exceed the context, or for an id in flight; EngineBroken; RuntimeError when asleep or closed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its generate call returns what it has, finish_reason `abort`. Unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode = "wait") -> None:
        """No token is made between return and `resume`; requests that come meanwhile wait. See PauseMode."""
        ...

    async def resume(self) -> None:
        """Go on. Idempotent."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget cached keys and values of earlier prompts. Requests that run are not harmed."""
        ...

    @property
    def num_workers(self) -> int:
        """Processes of the engine that receive weights: tp for vllm, 1 for engines in this process."""
        ...

    async def prepare_weights(self, update: WeightUpdate) -> None:
        """Receive and verify `update` while the old version is served on; nothing else changes.

        Raises WeightTransferError (what was staged is dropped, the old version is served on), ValueError naming
        missing, unknown or misshapen parameters or a version that is not above the current one. An engine without room
        for a second copy (`staging: none`) only joins the transfer and receives in `commit_weights`.
        """
        ...

    async def commit_weights(self, version: int, in_flight: PauseMode = "wait") -> CommitReport:
        """Serve the prepared `version`: pause, replace all parameters, forget cached prefixes, resume. From then on
        every token, of kept requests too, carries `version`.

        Raises ValueError when `version` is not the prepared one; WeightTransferError only without staging, and the
        engine is then broken (EngineBroken) until a later commit.
        """
        ...

    async def drop_weights(self, version: int) -> None:
        """Forget a prepared version, or end its reception. Idempotent; the current one is served on."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Give memory back: level 1 keeps weights in host memory, 2 drops them (commit a version after `wake`).
        Idempotent; a no-op in effect where the platform cannot."""
        ...

    async def wake(self) -> None:
        """Inverse of sleep. Idempotent."""
        ...

    @property
    def version(self) -> int:
        """Of the weights that are served."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End; requests in flight raise or return what they have. Idempotent."""
        ...
