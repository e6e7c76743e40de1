"""Protocols and data types that actors share: rows, prompts, samples, environments, rewards and train backends.

Those of generation engines are in `engines/protocol.py`.
"""

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
from .engines.protocol import Generator, SamplingParams

# ---------------------------------------------------------------- hosts


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Identity of a process, for errors, traces and clean-up."""

    name: str
    pid: int
    host: str

    @staticmethod
    def here(name: str) -> ActorInfo:
        """Describe the calling process."""
        return ActorInfo(name, os.getpid(), socket.gethostname())

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} on {self.host})"


@dataclass(frozen=True, slots=True)
class Span:
    """One timed piece of work in one process, for the trace."""

    name: str
    start_s: float
    """Unix time at which the work began."""
    dur_s: float
    """Seconds that the work took."""


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Spans encoded in few bytes, because reports go through the driver."""

    origin_s: float
    """Unix time that the spans count from; 0.0 when there are none."""
    spans: tuple[tuple[str, int, int], ...]
    """Name, microseconds after the origin and microseconds of duration of each span."""

    @staticmethod
    def of(spans: Sequence[Span]) -> SpanTable:
        origin_s = min((span.start_s for span in spans), default=0.0)
        return SpanTable(
            origin_s,
            tuple((span.name, round((span.start_s - origin_s) * 1e6), round(span.dur_s * 1e6)) for span in spans),
        )

    def to_spans(self) -> list[Span]:
        """Decode the spans; times are exact to the microsecond."""
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
"""Fields of the `train` partition. A row is prompt + response of L tokens; all fields are aligned with `input_ids`.

input_ids         token ids
response_mask     1 where the policy chose the token and training uses it, else 0; all 0 for a failed row
rollout_logprobs  log-prob with which the engine sampled the token (temperature applied), 0 where response_mask is 0
prev_logprobs     log-prob of the token under the policy at the start of the step, written back by train workers
ref_logprobs      log-prob of the token under the reference policy, written back by train workers
version_spans     [S, 2]: first token of a span and the policy version of the span; -1 where the policy did not choose

Tags (metadata, float32): `reward` (total), `valid` (1 or 0: a failed row), `response_length`; `reward/<name>` when the
advantages need single rewards.
"""

ROLLOUT_FIELDS = ("input_ids", "response_mask", "rollout_logprobs", "version_spans")
"""Fields that a rollout actor puts."""

TRAIN_FIELDS = ("input_ids", "response_mask", "rollout_logprobs")
"""Fields put by rollout actors that a train step reads."""

# ---------------------------------------------------------------- prompts, environments, rewards


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt as its source has it, before the run gives it a uid."""

    text: str
    """Text that the model is given, with the chat template applied."""
    answer: str
    """Expected answer, which rewards compare with; "" when the dataset has none."""
    fields: Mapping[str, Any]
    """Other columns of the dataset row, for the user's own rewards."""


class PromptSource(Protocol):
    """Gives prompts by index, from a file, a dataset or a generated task."""

    @property
    def name(self) -> str:
        """Name of the source, for errors."""
        ...

    @property
    def size(self) -> int | None:
        """Number of prompts; None when the source never ends."""
        ...

    def row(self, index: int) -> PromptRow:
        """Return prompt `index`, the same at every call. Raises ValueError naming the row when it is malformed."""
        ...

    def texts(self, start: int, stop: int) -> list[str]:
        """Return the texts of the prompts from `start` up to `stop`, faster than row by row."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the run's prompt stream."""

    uid: str
    """Id made from the prompt's position in the run's prompt stream; unique in the run."""
    text: str
    """Text that the model is given, with the chat template applied."""
    answer: str
    """Expected answer, which rewards compare with; "" when the dataset has none."""
    fields: Mapping[str, Any]
    """Other columns of the dataset row, for the user's own rewards."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished episode of one prompt."""

    prompt: Prompt
    index: int
    """Number of the sample in its group, 0..n-1."""
    input_ids: np.ndarray
    """Token ids of prompt + response, int32 `[L]`."""
    response_mask: np.ndarray
    """1 where the policy chose the token, else 0; uint8 `[L]`."""
    logprobs: np.ndarray
    """Log-prob that each token was sampled with, float32 `[L]`; 0 where the policy did not choose it."""
    text: str
    """Text of the response, without special tokens."""
    finish_reason: str
    """Reason why the episode ended: `stop`, `length` or `abort`; `error` for a failed row."""
    versions: np.ndarray
    """Policy version that produced each token, int32 `[L]`; -1 where the policy did not choose it (prompt, tools)."""
    error: str = ""
    """Description of what the episode failed with, in one line; its row is then a failed row. "" when it ended well."""

    @property
    def version(self) -> int:
        """Version of the oldest token that the policy chose; -1 when it chose none."""
        chosen = self.versions[self.versions >= 0]
        return int(chosen.min()) if len(chosen) else -1


@dataclass(frozen=True, slots=True)
class Score:
    """Rewards of one sample."""

    reward: float
    """Weighted total of the rewards; 0.0 when not valid, and the row is then masked and never trained on."""
    components: Mapping[str, float]
    """Unweighted value of each reward, by name."""
    valid: bool
    """Whether the sample can be trained on; False when a reward function or the episode itself failed."""
    error: str = ""
    """Description of the exception in one line; "" when valid."""


class Reward(Protocol):
    """One verifiable check. Plain functions with this signature are rewards too."""

    def __call__(self, prompt: Prompt, response: str, finish_reason: str, /) -> float: ...


# ---------------------------------------------------------------- environments

EPISODE_ERRORS = (ValueError, ArithmeticError, LookupError, TypeError)
"""Errors that only concern an episode, such as a prompt beyond the model's context or log-probs that are not finite.
Its rows are then failed rows, counted by `reward.max_error_share`. Other errors end the rollout."""


class Environment(Protocol):
    """Plays episodes of one prompt against an engine."""

    async def run(self, prompt: Prompt, engine: Generator, tokenizer: Any, params: SamplingParams) -> list[Sample]:
        """Return `params.n` finished episodes, in order of their `index`. Raises what the engine raises; after one of
        EPISODE_ERRORS all rows of the group are failed rows.

        tokenizer: a Hugging Face tokenizer.
        """
        ...


# ---------------------------------------------------------------- train backends


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward and backward pass, as this rank of the replica needs them."""

    batch: Batch
    """Packed columns; the backend pads or packs them as it likes. A pipeline stage gets only the fields that it uses (a
    middle stage none). A context-parallel rank gets only its pieces of each row (`codecs.context_slices`)."""
    lengths: np.ndarray
    """Number of tokens of each whole row, int64 `[N]`."""
    advantages: np.ndarray
    """Advantage of each row, float32 `[N]`."""
    group_ids: np.ndarray
    """Number of each row's group, int64 `[N]`."""
    group_tokens: np.ndarray | None
    """Number of response tokens in each row's whole group that the step trains on, int64 `[N]`; None unless
    `loss.aggregation=prompt`, which alone needs it."""


class TrainBackend(Protocol):
    """A model under training on this rank, driven as a state machine.

    `begin_step -> accumulate* -> finish_step | abort_step`. Every rank of the mesh makes the same calls in the same
    order, because most of them are collective.
    """

    def begin_step(self, temperature: float = 1.0) -> None:
        """Start a step with gradients and sums at zero. Raises RuntimeError when a step is open."""
        ...

    def accumulate(self, micros: Iterable[MicroBatch], count: int) -> None:
        """Run forward, summed loss and backward over `count` microbatches, one chunk of the step. Gradients stay
        unscaled sums.

        It may be called any number of times in a step, equally often and with equal counts on all ranks. It takes each
        microbatch from `micros` when it needs it, so that the next one is read while this one computes.
        """
        ...

    def finish_step(self) -> dict[str, float]:
        """All-reduce the denominators, scale the gradients once by 1/N, clip them and step the optimizer.

        Returns metrics over all ranks. With N = 0 or non-finite gradients the step is skipped and `train/skipped` is 1.
        """
        ...

    def abort_step(self) -> None:
        """Drop the gradients and sums of an open step. Idempotent."""
        ...

    def logprobs(
        self, micros: Iterable[MicroBatch], count: int, *, reference: bool = False, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Return each microbatch's log-probs, float32 `[sum(lengths)]` on the CPU, aligned with input_ids.

        Each is the log-prob of a token given those before it. It is 0 at each row's first token and, when the batch has
        `response_mask`, wherever that is 0. The call is collective. The replica's writer (`Topology.writer`) gets whole
        rows, other ranks get [].
        """
        ...

    def weight_specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each weight by HF name, in the order of `weights`; the same on every rank.

        Names are those of the HF model's parameters (experts stacked); tied ones appear once. The call is not
        collective.
        """
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield HF name and full tensor of each weight, gathered one weight (or fused module) at a time.

        The whole model is never gathered at once. The call is collective, so every rank must iterate to the end. Rank
        0's tensors are whole, on the backend's device, detached and valid until the next one is asked for; on the other
        ranks they are empty.
        """
        ...

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write a sharded checkpoint of model, optimizer, schedule and RNG. Collective.

        Without `wait` it is written in the background; the next save, `wait_saved` or close raises what went wrong.
        """
        ...

    def wait_saved(self) -> None:
        """Wait until nothing is being written. Raises what the last write raised, once."""
        ...

    def load(self, path: str) -> None:
        """Read a checkpoint that `save` wrote, on any number of ranks. Collective."""
        ...

    def export_model(self, path: str) -> None:
        """Write a HF model folder (weights, config, tokenizer) from rank 0. Collective."""
        ...

    def close(self) -> None:
        """Release the model and the files that are being written. Idempotent."""
        ...
