"""Protocols and data types that actors share: rows, prompts, samples, environments and rewards.

The protocols of generation engines are in `engines/protocol.py`, that of train backends is in `train_backend.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..codecs.schema import DTYPES, Field, Kind, Schema
from ..codecs.tokens.masks import MASK_FIELD, MASKS
from ..codecs.tokens.routes import ROUTES, RouteSpec
from .columns import ColumnConfig, TokenValues
from .engines.protocol import Generator, SamplingParams
from .failures import FailureKind
from .images.prompt_pictures import Picture

if TYPE_CHECKING:
    from .images.processor import Prepared  # It imports transformers, which takes seconds.

# ---------------- Spans are timed pieces of work, for the trace of a run.


@dataclass(frozen=True, slots=True)
class Span:
    """One timed piece of work in one process, for the run's trace."""

    name: str
    start_s: float
    """Unix time in seconds at which the work began."""
    dur_s: float
    """Duration of the work in seconds."""


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Compact form of a list of spans (timed pieces of work). Actors send it to the driver in their reports."""

    origin_s: float
    """Unix time in seconds relative to which the start times in `spans` are given; 0.0 when there are no spans."""
    spans: tuple[tuple[str, int, int], ...]
    """One tuple for each span: name, start in microseconds since `origin_s`, and duration in microseconds."""

    @staticmethod
    def of(spans: Sequence[Span]) -> SpanTable:
        origin_s = min((span.start_s for span in spans), default=0.0)
        return SpanTable(
            origin_s,
            tuple((span.name, round((span.start_s - origin_s) * 1e6), round(span.dur_s * 1e6)) for span in spans),
        )

    def to_spans(self) -> list[Span]:
        """Return the spans as a list. Times are rounded to the microsecond."""
        return [Span(name, self.origin_s + start / 1e6, length / 1e6) for name, start, length in self.spans]


# ---------------- Rows of the data plane have these fields.

ROLLOUT_SCHEMA = Schema(
    [
        Field("input_ids", Kind.PER_TOKEN, torch.int32, shared=True),
        Field("response_mask", Kind.PER_TOKEN, torch.uint8),
        Field("rollout_logprobs", Kind.PER_TOKEN, torch.float32),
        Field("prev_logprobs", Kind.PER_TOKEN, torch.float32),
        Field("ref_logprobs", Kind.PER_TOKEN, torch.float32),
        Field("teacher_logprobs", Kind.PER_TOKEN, torch.float32),
        Field("version_spans", Kind.RAGGED, torch.int32, ndim=2),
    ]
)
"""Fields of the rows in the `train` partition. A row holds the L tokens of a prompt and its response, and its per-token
fields are aligned with `input_ids`.

input_ids         token ids
response_mask     1 where the policy chose the token and training uses it, else 0; all 0 for a failed row
rollout_logprobs  log-prob of the token under the sampling policy (temperature applied); 0 where response_mask is 0
prev_logprobs     log-prob of the token under the policy at the start of the step, written back by train workers
ref_logprobs      log-prob of the token under the reference policy, written back by train workers
teacher_logprobs  log-prob of the token under the teachers, averaged with their weights, written back by train workers
version_spans     [S, 2], one entry for each span of tokens that have the same policy version: index of the first
                  token, version (-1 where the policy did not choose the tokens)

Besides the fields, each row has tags, which are metadata in the data plane: `reward` (total), `valid` (1, or 0 for a
failed row), `response_length`, `reward/<name>` for each individual reward that the advantages need (all float32), and
`position` (integer), the position of the row's prompt in the prompt stream.
"""

ROLLOUT_FIELDS = ("input_ids", "response_mask", "rollout_logprobs", "version_spans")
"""Fields of ROLLOUT_SCHEMA that rollout actors write to the data plane. Train workers add the other fields later."""

TRAIN_FIELDS = ("input_ids", "response_mask", "rollout_logprobs")
"""Fields in ROLLOUT_FIELDS that a train step reads."""


TOP_IDS, TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"


def row_schema(
    routes: RouteSpec | None,
    columns: Sequence[ColumnConfig] = (),
    top_k: int = 0,
    *,
    several_rows: bool = False,
    images: Field | None = None,
    masks: bool = False,
) -> Schema:
    """Return the schema of a run's rows: ROLLOUT_SCHEMA, the user's columns, and with router replay `routed_experts`.
    With `masks`, rows also have `sampling_masks`.

    With `top_k` above 0, rows also have the teacher's `top_k` most likely tokens at each position, written back by
    train workers: TOP_IDS, int32 `[L, top_k]`, and their log-probs TOP_LOGPROBS, float32. routes: shape of the model's
    routes; None for a run without router replay. columns: see `data.columns`. several_rows: whether an episode may have
    several rows; they often repeat a long history, so all fields of TRAIN_FIELDS then share leading tokens. images:
    declaration of the column of pictures; None without pictures. Raises ValueError if two fields have the same name.
    """
    own = [Field(column.name, Kind(column.kind), DTYPES[column.dtype]) for column in columns]
    names = [*ROLLOUT_SCHEMA, ROUTES, MASKS, TOP_IDS, TOP_LOGPROBS, *([] if images is None else [images.name])]
    for field_ in own:
        if field_.name in names:
            raise ValueError(f"data.columns: got {field_.name!r}, expected a name that no other field of a row has")
        names.append(field_.name)
    top = [(TOP_IDS, torch.int32), (TOP_LOGPROBS, torch.float32)] if top_k else []
    of_teacher = [Field(name, Kind.PER_TOKEN, dtype, (top_k,)) for name, dtype in top]
    fields = [
        replace(one, shared=one.shared or several_rows and name in TRAIN_FIELDS) for name, one in ROLLOUT_SCHEMA.items()
    ]
    extra = [images, None if routes is None else routes.field, MASK_FIELD if masks else None]
    return Schema([*fields, *(one for one in extra if one is not None), *of_teacher, *own])


def written_fields(
    routes: RouteSpec | None, columns: Sequence[ColumnConfig] = (), images: Field | None = None
) -> tuple[str, ...]:
    """Return the fields that rollout actors write. They are ROLLOUT_FIELDS, the user's columns, with router replay
    `routed_experts`, and the column of pictures. routes, columns, images: see `row_schema`."""
    pictures = [] if images is None else [images.name]
    return (*ROLLOUT_FIELDS, *pictures, *([] if routes is None else [ROUTES]), *(column.name for column in columns))


# ---------------- These classes describe prompts, samples and rewards.


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt as read from its source (a file, dataset or generated task), before the run gives it a uid."""

    text: str
    """Prompt text as the model receives it, after any chat template has been applied."""
    answer: str
    """Expected answer, which reward functions compare with the response; "" when the dataset has none."""
    fields: Mapping[str, Any]
    """Other columns of the dataset row, for use by environments and custom reward functions."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Chat messages from which `text` was rendered, for environments that continue the conversation; () for a text
    prompt."""
    pictures: tuple[Picture, ...] = ()
    """Pictures of the prompt, in the order in which they stand in it; not read yet."""
    place: str = ""
    """Place of the row in its file or dataset, for messages; "" if it was made here."""

    @property
    def rendered(self) -> bool:
        """True if a chat template made `text`, so that `text` has its special tokens already."""
        return bool(self.messages)


class PromptSource(Protocol):
    """Source of prompts that are read by index: a file, a dataset or a generated task."""

    @property
    def name(self) -> str:
        """Name of the source in error messages."""
        ...

    @property
    def size(self) -> int | None:
        """Number of prompts; None if the source is endless."""
        ...

    def row(self, index: int) -> PromptRow:
        """Return the prompt at `index`. Every call with the same index returns the same prompt. Raises ValueError,
        which names the row, if the row is malformed."""
        ...

    def rows(self, start: int, stop: int) -> list[PromptRow]:
        """Return the prompts with indices `start` to `stop - 1`. A source may implement this more efficiently than
        separate calls of `row`."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt at one position of the run's prompt stream, the sequence in which the run reads its prompts."""

    uid: str
    """Id made from the prompt's position in the run's prompt stream; unique in the run."""
    text: str
    """Prompt text as the model receives it, after any chat template has been applied."""
    answer: str
    """Expected answer, which reward functions compare with the response; "" when the dataset has none."""
    fields: Mapping[str, Any]
    """Other columns of the dataset row, for use by environments and custom reward functions."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Chat messages from which `text` was rendered, for environments that continue the conversation; () for a text
    prompt."""
    pictures: tuple[Picture, ...] = ()
    """Pictures of the prompt, in the order in which they stand in it; not read yet."""
    prepared: tuple[Prepared, ...] = ()
    """The pictures after preprocessing, in the same order; () before. Then `text` has all their placeholder tokens."""
    place: str = ""
    """Place of the prompt's row in its file or dataset, for messages; "" if it was made here."""

    @property
    def rendered(self) -> bool:
        """True if a chat template made `text`, so that `text` has its special tokens already."""
        return bool(self.messages)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy in an episode: its text, and the positions of its tokens."""

    text: str
    """Text of the turn without special tokens."""
    finish_reason: str
    """Reason why the turn ended: `stop` or `length`."""
    start: int
    """Index of the turn's first token in its row."""
    num_tokens: int
    """Number of tokens that the policy chose in the turn, stop token included."""
    row: int = 0
    """Index of the turn's row among the rows of its episode."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Columns of the L tokens of one row."""

    input_ids: np.ndarray
    """Token ids, int32 `[L]`."""
    response_mask: np.ndarray
    """Mask of the policy's tokens, uint8 `[L]`: 1 where the policy chose the token, else 0."""
    logprobs: np.ndarray
    """Log-prob of each token under the policy that sampled it, float32 `[L]`; 0 where the policy did not choose it."""
    versions: np.ndarray
    """Policy version that produced each token, int32 `[L]`; -1 where the policy did not choose it."""
    routes: tuple[tuple[int, np.ndarray], ...] = ()
    """Routes that the engine reported, in pieces (see `Completion.routes`): a piece is the index of its first token in
    `input_ids` and the routes `[n, layers, k]`. Where pieces overlap, the earlier piece counts. `router_replay.missing`
    decides what happens to tokens without a route. () without router replay."""
    pictures: tuple[Prepared, ...] = ()
    """Pictures whose placeholder tokens are in `input_ids`, in order."""
    masks: np.ndarray | None = None
    """Sets of tokens from which the row's tokens were drawn, as a stream of uint8 (see `codecs.tokens.masks`); None if
    no token has a set."""

    @property
    def version(self) -> int:
        """Lowest policy version among the tokens that the policy chose; -1 when it chose none."""
        return _lowest_version(self.versions)


def _lowest_version(versions: np.ndarray) -> int:
    chosen = versions[versions >= 0]
    return int(chosen.min()) if len(chosen) else -1


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished episode that started from a prompt: its tokens, turns and rewards, and the reason why it ended. It
    becomes one row of the data plane, and one more for each entry of `more_rows`."""

    prompt: Prompt
    index: int
    """Index of the sample among the n samples of its prompt, 0..n-1."""
    input_ids: np.ndarray
    """Token ids of prompt + response, int32 `[L]`."""
    response_mask: np.ndarray
    """Mask of the response, uint8 `[L]`: 1 where the policy chose the token, else 0."""
    logprobs: np.ndarray
    """Log-prob of each token under the policy that sampled it, float32 `[L]`; 0 where the policy did not choose the
    token."""
    text: str
    """Text of the response, without special tokens."""
    finish_reason: str
    """Reason why the episode ended: `stop`, `length` or `abort`; `timeout` when it ran out of time but keeps its
    rewards; `error` when it failed."""
    versions: np.ndarray
    """Policy version that produced each token, int32 `[L]`; -1 where the policy did not choose it (prompt, tools)."""
    error: str = ""
    """Message of the error that made the episode fail; "" if it did not fail. `environment.on_failure` says what
    becomes of the rows of a failed sample."""
    failure: FailureKind | None = None
    """Kind of the failure; None if the episode did not fail."""
    retries: int = 0
    """Number of times that the episode was played before, because it had failed."""
    routes: tuple[tuple[int, np.ndarray], ...] = ()
    """Routes of the first row (see `RowTokens.routes`)."""
    pictures: tuple[Prepared, ...] = ()
    """Pictures of the first row (see `RowTokens.pictures`)."""
    masks: np.ndarray | None = None
    """Sampling masks of the first row (see `RowTokens.masks`)."""
    turns: tuple[Turn, ...] = ()
    """Turns of the policy, in order."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards that the environment itself gave, by name. The reward function `environment` reads them."""
    columns: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the environment set for the user's `per_sample` columns, by name."""
    token_values: tuple[TokenValues, ...] = ()
    """Numbers that the environment set for turns, in the user's `per_token` columns."""
    more_rows: tuple[RowTokens, ...] = ()
    """Further rows of the episode, if its turns do not all continue the same tokens; () for an episode with one row."""

    @property
    def rows(self) -> tuple[RowTokens, ...]:
        """All rows of the episode, at least one."""
        first = RowTokens(
            self.input_ids, self.response_mask, self.logprobs, self.versions, self.routes, self.pictures, self.masks
        )
        return first, *self.more_rows

    @property
    def version(self) -> int:
        """Lowest policy version among the tokens that the policy chose; -1 when it chose none."""
        lowest = [_lowest_version(self.versions), *(row.version for row in self.more_rows)]
        return min((version for version in lowest if version >= 0), default=-1)


@dataclass(frozen=True, slots=True)
class Score:
    """Rewards of one sample."""

    reward: float
    """Weighted sum of the rewards. It is 0.0 when `valid` is False; the row is then masked and never trained on."""
    components: Mapping[str, float]
    """Unweighted value of each reward function, by name."""
    valid: bool
    """True if the sample can be trained on; False if a reward function or the episode failed, or if generation was
    aborted."""
    error: str = ""
    """Description of the failure in one line; "" if nothing failed. A sample that failed can still be valid, with the
    reward 0 (`zero` in `environment.on_failure`)."""
    failure: FailureKind | None = None
    """Kind of the failure; None if nothing failed."""
    answer: str | None = None
    """Answer for which the response counts in a majority vote; None if the response has no answer, or if there is no
    vote."""


class Reward(Protocol):
    """Function that scores a response to a prompt. Any callable with this signature is a reward."""

    def __call__(self, prompt: Prompt, response: str, finish_reason: str, /) -> float: ...


# ---------------- Environments play the episodes of prompts.

EPISODE_ERRORS = (ValueError, ArithmeticError, LookupError, TypeError)
"""Types of errors that make only a single episode fail, such as a prompt that exceeds the model's context or log-probs
that are not finite. The rows of a failed episode are not trained on; if their share exceeds `reward.max_error_share`,
the run stops. Any other error ends the rollout."""


class GroupPlayer(Protocol):
    """Protocol of an object that plays all episodes of a prompt and generates the policy's tokens with an engine.

    `environments.host.EpisodeHost` implements it for any environment that plays one episode at a time.
    """

    async def run(self, prompt: Prompt, engine: Generator, tokenizer: Any, params: SamplingParams) -> list[Sample]:
        """Play `params.n` episodes of `prompt` and return their samples, in order of their `index`.

        tokenizer: a Hugging Face tokenizer. Raises the engine's errors. If an error is one of EPISODE_ERRORS, the
        caller records all samples of the prompt as failed.
        """
        ...

    async def close(self) -> None:
        """Release everything that the environment has started. No episode may be in flight. Idempotent."""
        ...
