"""What actors host and what hosts ask of them: engines, environments, rewards, train backends."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..codecs.batch import Batch
from ..codecs.schema import Field, Kind, Schema

# ---------------------------------------------------------------- hosts


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Who a process is, for errors, traces and clean-up."""

    name: str
    pid: int
    host: str

    @staticmethod
    def here(name: str) -> ActorInfo:
        """This process."""
        return ActorInfo(name, os.getpid(), socket.gethostname())

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} on {self.host})"


@dataclass(frozen=True, slots=True)
class Span:
    """One timed piece of work in one process, for the trace."""

    name: str
    start_s: float
    """Unix time."""
    dur_s: float


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
"""Fields of the `train` partition. A row is prompt + response, L tokens; all fields are aligned with `input_ids`.

input_ids         token ids
response_mask     1 where the policy chose the token and it is to be trained on, else 0; all 0 for a failed row
rollout_logprobs  log-prob that the engine sampled the token with (temperature applied), 0 where response_mask is 0
prev_logprobs     the same token under the policy as it was when the step began, written back by train workers
ref_logprobs      the same token under the reference policy, written back by train workers

Tags (metadata, float32): `reward` (total), `valid` (1 or 0: a failed row), `response_length`; `reward/<name>` when the
advantages need single rewards.
"""

ROLLOUT_FIELDS = ("input_ids", "response_mask", "rollout_logprobs")
"""What a rollout actor puts."""

# ---------------------------------------------------------------- prompts, environments, rewards


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt before it is part of a run."""

    text: str
    """What the model is given, template applied."""
    answer: str
    """What rewards compare with; "" when the dataset has none."""
    fields: Mapping[str, Any]
    """The dataset row's other columns, for rewards of the user's own."""


class PromptSource(Protocol):
    """Prompts by index: a file, a dataset, a generated task."""

    @property
    def name(self) -> str:
        """Where they come from, for errors."""
        ...

    @property
    def size(self) -> int | None:
        """Number of prompts; None when endless."""
        ...

    def row(self, index: int) -> PromptRow:
        """Prompt `index`, the same at every call. Raises ValueError naming the row when it is malformed."""
        ...


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

    def __call__(self, prompt: Prompt, response: str, finish_reason: str, /) -> float: ...


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
    """None: the engine's own."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end tokens."""

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("n", self.n >= 1, "at least 1"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
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
    version: int
    """Policy version that produced the first token."""


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


class GenerationEngine(Protocol):
    """Turns prompt token ids into completions under the current policy version.

    One per rollout actor; async, so that episodes run concurrently.
    """

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

        Names are those of the HF checkpoint. Raises ValueError naming missing, unknown or misshapen parameters, and
        then still serves the old version.
        """
        ...

    async def sleep(self) -> None:
        """Give memory back (weights may go); `wake` before the next generate."""
        ...

    async def wake(self) -> None: ...

    @property
    def version(self) -> int: ...

    @property
    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


class Environment(Protocol):
    """Plays episodes of one prompt against an engine."""

    async def run(
        self, prompt: Prompt, engine: GenerationEngine, tokenizer: Any, params: SamplingParams
    ) -> list[Sample]:
        """`params.n` finished episodes, in order of their `index`. Raises what the engine raises.

        tokenizer: a Hugging Face tokenizer.
        """
        ...


# ---------------------------------------------------------------- train backends


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward / backward, as this rank of the replica needs them."""

    batch: Batch
    """Packed columns; the backend pads or packs as it likes. A pipeline stage has only the fields it uses (a middle one
    none); a context-parallel rank has of each row only its pieces (`codecs.context_slices`)."""
    lengths: np.ndarray
    """int64 `[N]`: tokens of each whole row."""
    advantages: np.ndarray
    """float32 `[N]`: one per row."""
    group_ids: np.ndarray
    """int64 `[N]`."""
    group_tokens: np.ndarray | None
    """int64 `[N]`: response tokens that the step trains on in each row's whole group; None unless
    `loss.aggregation=prompt`, which alone needs it."""


class TrainBackend(Protocol):
    """A model under training on this rank, and the train-step state machine:

    `begin_step -> accumulate* -> finish_step | abort_step`. Collective: every rank of the mesh makes the same calls in
    the same order.
    """

    def begin_step(self, temperature: float = 1.0) -> None:
        """Start a step: zero gradients and sums. Raises RuntimeError when one is open."""
        ...

    def accumulate(self, micros: Iterable[MicroBatch], count: int) -> None:
        """Forward, summed loss, backward of `count` microbatches, a chunk of the step. Gradients stay unscaled sums.

        May be called any number of times in a step, equally often and with equal counts on all ranks; pulls from
        `micros` as it needs them, so that the next one is read while this one computes.
        """
        ...

    def finish_step(self) -> dict[str, float]:
        """All-reduce the denominators, scale gradients once by 1/N, clip, step the optimizer. Metrics are global.

        N = 0 or non-finite gradients: the step is skipped and `train/skipped` is 1.
        """
        ...

    def abort_step(self) -> None:
        """Drop gradients and sums of an open step. Idempotent."""
        ...

    def logprobs(
        self, micros: Iterable[MicroBatch], count: int, *, reference: bool = False, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Per microbatch, float32 `[sum(lengths)]` on the CPU, aligned with input_ids: log-prob of each token given
        those before it; 0 at each row's first token and, when the batch has `response_mask`, wherever it is 0.

        Collective. Whole rows on the replica's writer (`Topology.writer`); other ranks get [].
        """
        ...

    def export_weights(self) -> Mapping[str, torch.Tensor]:
        """HF name -> full tensor on the CPU. Collective; only rank 0's result is filled."""
        ...

    def save(self, path: str, *, wait: bool = True) -> None:
        """Sharded checkpoint of model, optimizer, schedule and RNG. Collective.

        Without `wait` it is written behind training: the next save, `wait_saved` or close raises what went wrong.
        """
        ...

    def wait_saved(self) -> None:
        """Until nothing is being written. Raises what the last write raised, once."""
        ...

    def load(self, path: str) -> None:
        """Inverse of save; any number of ranks. Collective."""
        ...

    def export_model(self, path: str) -> None:
        """Write a HF model folder (weights, config, tokenizer). Collective; rank 0 writes."""
        ...

    def close(self) -> None: ...
