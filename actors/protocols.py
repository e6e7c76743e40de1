"""What actors host and what hosts ask of them: environments, rewards, train backends. Engines: engines/protocol.py."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..codecs.batch import Batch
from ..codecs.schema import Field, Kind, Schema
from .engines.protocol import GenerationEngine, SamplingParams

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


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Spans in few bytes: reports go through the driver."""

    origin_s: float
    """Unix time that they count from; 0.0 when there are none."""
    spans: tuple[tuple[str, int, int], ...]
    """(name, microseconds after the origin, microseconds long)."""

    @staticmethod
    def of(spans: Sequence[Span]) -> SpanTable:
        origin_s = min((span.start_s for span in spans), default=0.0)
        return SpanTable(
            origin_s,
            tuple((span.name, round((span.start_s - origin_s) * 1e6), round(span.dur_s * 1e6)) for span in spans),
        )

    def to_spans(self) -> list[Span]:
        """Inverse of `of`, to the microsecond."""
        return [Span(name, self.origin_s + start / 1e6, length / 1e6) for name, start, length in self.spans]


# ---------------------------------------------------------------- rows

ROLLOUT_SCHEMA = Schema(
    [
        Field("input_ids", Kind.PER_TOKEN, torch.int32),
        Field("response_mask", Kind.PER_TOKEN, torch.uint8),
        Field("rollout_logprobs", Kind.PER_TOKEN, torch.float32),
        Field("prev_logprobs", Kind.PER_TOKEN, torch.float32),
        Field("ref_logprobs", Kind.PER_TOKEN, torch.float32),
        Field("version_spans", Kind.RAGGED, torch.int32, ndim=2),
    ]
)
"""Fields of the `train` partition. A row is prompt + response, L tokens; all fields are aligned with `input_ids`.

input_ids         token ids
response_mask     1 where the policy chose the token and it is to be trained on, else 0; all 0 for a failed row
rollout_logprobs  log-prob that the engine sampled the token with (temperature applied), 0 where response_mask is 0
prev_logprobs     the same token under the policy as it was when the step began, written back by train workers
ref_logprobs      the same token under the reference policy, written back by train workers
version_spans     [S, 2]: (first token, policy version of it and those after it); -1 where the policy did not choose

Tags (metadata, float32): `reward` (total), `valid` (1 or 0: a failed row), `response_length`; `reward/<name>` when the
advantages need single rewards.
"""

ROLLOUT_FIELDS = ("input_ids", "response_mask", "rollout_logprobs", "version_spans")
"""What a rollout actor puts."""

TRAIN_FIELDS = ("input_ids", "response_mask", "rollout_logprobs")
"""What of it a train step reads."""

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
    versions: np.ndarray
    """int32 `[L]`: policy version that produced each token; -1 where the policy did not choose it (prompt, tools)."""

    @property
    def version(self) -> int:
        """Of the oldest token that the policy chose; -1 when there is none."""
        chosen = self.versions[self.versions >= 0]
        return int(chosen.min()) if len(chosen) else -1


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


# ---------------------------------------------------------------- environments


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

    def weight_specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """HF name -> dtype and shape of each weight, in the order of `weights`; the same on every rank. Not collective.

        Names are those of the HF model's parameters (experts stacked), tied ones once.
        """
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF name and full tensor of each weight, gathered one (or one fused module) at a time, never the whole model.

        Collective: every rank iterates to the end. Rank 0's tensors are whole, on the backend's device, detached and
        valid until the next is asked for; on the other ranks they are empty.
        """
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
