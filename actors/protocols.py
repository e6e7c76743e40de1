"""What actors host and what hosts ask of them: engines, environments, rewards, train backends, weight transports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..codecs.batch import Batch
from ..codecs.schema import Field, Kind, Schema

# ---------------------------------------------------------------- rows

ROLLOUT_SCHEMA = Schema(
    [
        Field("input_ids", Kind.PER_TOKEN, torch.int32),
        Field("response_mask", Kind.PER_TOKEN, torch.uint8),
        Field("rollout_logprobs", Kind.PER_TOKEN, torch.float32),
        Field("prev_logprobs", Kind.PER_TOKEN, torch.float32),
        Field("ref_logprobs", Kind.PER_TOKEN, torch.float32),
    ]
)
"""Fields of the `train` partition. A row is prompt + response, L tokens; all PER_TOKEN fields are aligned with `input_ids`.

input_ids         token ids
response_mask     1 where the policy chose the token and it is to be trained on, else 0; all 0 for a failed row
rollout_logprobs  log-prob that the engine gave the token when it sampled it (temperature applied), 0 where response_mask is 0
prev_logprobs     the same token under the policy as it was when the step began, written back by train workers
ref_logprobs      the same token under the reference policy, written back by train workers

Tags (metadata, float32): `reward` (total), `valid` (1 or 0: a failed row), `response_length`.
"""

ROLLOUT_FIELDS = ("input_ids", "response_mask", "rollout_logprobs")
"""What a rollout actor puts."""

# ---------------------------------------------------------------- prompts, environments, rewards


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a dataset."""

    uid: str
    """Minted from the prompt's position in the run's prompt stream; unique in the run."""
    text: str
    """What the model is given, template applied."""
    answer: str
    """What rewards compare with; "" when the dataset has none."""
    fields: Mapping[str, Any]
    """The dataset row's other columns, for rewards of the user's own."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished episode of one prompt."""

    prompt: Prompt
    index: int
    """0..n-1 in its group."""
    input_ids: np.ndarray
    """int32 `[L]`: prompt + response."""
    response_mask: np.ndarray
    """uint8 `[L]`."""
    logprobs: np.ndarray
    """float32 `[L]`."""
    text: str
    """The response as text, without special tokens."""
    finish_reason: str
    """`stop`, `length` or `abort`; `error` for a failed row."""
    version: int
    """Policy version of the oldest token."""


@dataclass(frozen=True, slots=True)
class Score:
    """A rewarded sample."""

    reward: float
    """Weighted total; 0.0 when not valid (and masked then, never trained on)."""
    components: Mapping[str, float]
    """Each reward's own value, unweighted."""
    valid: bool
    """False when a reward function raised."""
    error: str = ""
    """The exception, one line, when not valid."""


class Reward(Protocol):
    """One verifiable check. Plain functions with this signature are rewards too."""

    def __call__(self, prompt: Prompt, response: str, finish_reason: str) -> float: ...


# ---------------------------------------------------------------- engines


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
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation."""

    token_ids: np.ndarray
    """int32 `[T]`: the response only; ends with the stop token when finish_reason is `stop`."""
    logprobs: np.ndarray
    """float32 `[T]`."""
    finish_reason: str
    """`stop`, `length` or `abort` (partial output)."""
    version: int
    """Policy version that produced the first token."""


class GenerationEngine(Protocol):
    """Turns prompt token ids into completions under the current policy version. One per rollout actor; async, so that episodes run concurrently."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """`params.n` completions, in order. Concurrent calls are batched by the engine.

        Raises ValueError naming the lengths when prompt + max_new_tokens exceed the context.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its generate call returns what it has, finish_reason `abort`. Unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Finish what runs, start nothing new until `resume`."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, version: int, named: Mapping[str, torch.Tensor]) -> None:
        """Replace all parameters at once, between two generation steps; from then on tokens carry `version`.

        Names are those of the HF checkpoint. Raises ValueError naming missing, unknown or misshapen parameters, and then still serves the old version.
        """
        ...

    async def sleep(self) -> None:
        """Give memory back (weights may go); `wake` before the next generate."""
        ...

    async def wake(self) -> None: ...

    @property
    def version(self) -> int: ...

    async def close(self) -> None: ...


# ---------------------------------------------------------------- train backends


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward / backward."""

    batch: Batch
    """Packed columns; the backend pads or packs as it likes."""
    advantages: np.ndarray
    """float32 `[N]`: one per row."""
    group_ids: np.ndarray
    """int64 `[N]`."""


class TrainBackend(Protocol):
    """A model under training on this rank, and the train-step state machine:

    `begin_step -> accumulate* -> finish_step | abort_step`. Collective: every rank of the mesh makes the same calls in the same order.
    """

    def begin_step(self, temperature: float = 1.0) -> None:
        """Start a step: zero gradients and sums. Raises RuntimeError when one is open."""
        ...

    def accumulate(self, micro: MicroBatch) -> None:
        """Forward, summed loss, backward. Gradients stay unscaled sums."""
        ...

    def finish_step(self) -> dict[str, float]:
        """All-reduce the denominators, scale gradients once by 1/N, clip, step the optimizer. Metrics are global.

        N = 0 or non-finite gradients: the step is skipped and `train/skipped` is 1.
        """
        ...

    def abort_step(self) -> None:
        """Drop gradients and sums of an open step. Idempotent."""
        ...

    def logprobs(self, batch: Batch, *, reference: bool = False, temperature: float = 1.0) -> torch.Tensor:
        """float32 `[sum(lengths)]`, aligned with input_ids: log-prob of each token given those before it; 0 at each row's first token."""
        ...

    def export_weights(self) -> Mapping[str, torch.Tensor]:
        """HF name -> full tensor on the CPU. Collective; only rank 0's result is filled."""
        ...

    def save(self, path: str) -> None:
        """Sharded checkpoint of model, optimizer, schedule and RNG. Collective."""
        ...

    def load(self, path: str) -> None:
        """Inverse of save; any number of ranks. Collective."""
        ...

    def close(self) -> None: ...
