"""Protocols of an engine: `Generator` samples tokens, `WeightHost` takes new weights, `Sleeper` pauses and sleeps.

Code that uses an engine asks for the narrowest protocol that it needs. `ServingEngine` is a generator with counters and
a method to close it. `GenerationEngine` can also take weights and sleep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np

from ...codecs.blobs import Blob
from ...codecs.weights.parameter_digests import ParameterDigests
from ..process.memory import ProcessMemory
from ..weight_sync.base_offer import WeightOffer
from ..weight_sync.transports.protocol import WeightUpdate

PauseMode = Literal["keep", "wait", "abort"]
"""Treatment of requests in flight during a pause. `keep` freezes them, and they continue after `resume`. `wait` lets
them finish first. `abort` ends them at once with the tokens generated so far (finish_reason `abort`)."""

KeysAndValues = Literal["keep", "recompute"]
"""Treatment of the keys and values of requests that continue after new weights were committed. `keep` uses the older
weights' keys and values for the earlier tokens; `recompute` computes them with the new weights before the next token.
Requests that begin after the commit never read older keys and values."""

Prepared = Literal["staged", "joined"]
"""State of an engine after `prepare_weights`. `staged`: it holds the complete, verified version beside the one it
serves. `joined`: it has only joined the transfer, and receives the weights directly into its parameters during the
commit."""

SESSION_SEPARATOR = "/"
"""Separator of session and turn in a request id, which is `{session}` or `{session}/{turn}`. All turns of a session are
sent to the same engine, whose prefix cache holds the earlier turns."""


def expect_pause_mode(mode: str) -> None:
    """Raise ValueError unless `mode` is a PauseMode."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"pause mode: got {mode!r}, expected one of {', '.join(get_args(PauseMode))}")


@dataclass(frozen=True, slots=True)
class CutOff:
    """A sample that was cut off and is continued by another request."""

    request_id: str
    """Id of the request that began the sample."""
    sample: int
    """Index of the sample in that request."""
    tokens: int
    """Number of tokens that the sample has so far."""


BASE = "base"
"""Name of the model without its adapter, as requests give it."""
Which = Literal["", "base"]
"""The model that a request names: "" is the newest version of the policy, `base` the model without its adapter."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. Reported log-probs are those of the distribution that is sampled from, with
    temperature, min-p, top-k, top-p and `mask_limit` applied in this order."""

    n: int = 1
    """Number of completions to generate for the prompt."""
    max_new_tokens: int = 16
    """Largest number of tokens of a completion."""
    temperature: float = 1.0
    """Sampling temperature; 0.0 decodes greedily."""
    top_p: float = 1.0
    """Probability mass that nucleus sampling keeps; 1.0 keeps all."""
    top_k: int = 0
    """Number of most likely tokens that sampling keeps; 0 keeps all."""
    min_p: float = 0.0
    """Smallest probability that sampling keeps, as a share of the most likely token's; 0.0 keeps all."""
    mask_limit: int = 0
    """Largest number of most likely tokens that sampling keeps where top-p, top-k or min-p cuts tokens off. Completions
    then have `masks`. 0 means no limit, and no masks."""
    seed: int | None = None
    """Seed of the request's random numbers; None uses the engine's own seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, in addition to the model's own end tokens (see `end_tokens`)."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, wherever they fall in its tokens. The tokens that complete such a text are kept. A
    special token of the tokenizer counts as a token id."""
    routes_from: int = 0
    """Index of the first prompt token whose route is wanted, for engines that record routes. A request that continues
    an earlier one asks only for the routes that are still missing."""
    adapter: Which = ""
    """The model that the tokens are sampled from."""
    schema: str = ""
    """JSON schema that the text of the completions must match; "" leaves it free. Tokens that do not fit are excluded
    at each step, so log-probs are those of the tokens that are left. Only the `vllm` engine can do this."""
    pictures: tuple[Blob, ...] = ()
    """Pictures of the prompt, in order. Their parts are arguments of the model's forward pass, and the prompt has one
    placeholder token for each of their features."""
    own_places: tuple[int, ...] = ()
    """Positions in the prompt of placeholder tokens that the policy sampled in earlier turns, which thus stand for
    themselves. Those of the sample that the request continues need not be named."""
    continues: CutOff | None = None
    """The sample that this request continues; the sample's tokens so far are the end of the prompt. None for a request
    that begins a sample."""

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("n", self.n >= 1, "at least 1"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) or more"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 (off) to 1"),
            ("mask_limit", self.mask_limit >= 0, "0 (off) or more"),
            ("stop", all(self.stop), "texts that are not empty"),
            ("routes_from", self.routes_from >= 0, "0 or more"),
        ):
            if not fits:
                raise ValueError(f"sampling {name}: got {getattr(self, name)}, expected {expected}")

    def own_tokens(self, length: int) -> np.ndarray:
        """Return which tokens of a prompt with this length are no features of pictures in any case, bool `[length]`."""
        found = np.zeros(length, np.bool_)
        found[list(self.own_places)] = True
        found[length - (0 if self.continues is None else self.continues.tokens) :] = True
        return found

    @property
    def masked(self) -> bool:
        """True if completions have masks, because tokens are cut off and `mask_limit` is not 0."""
        cuts = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
        return self.mask_limit > 0 and self.temperature > 0.0 and cuts


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: np.ndarray
    """Token ids of the response alone, int32 `[T]`. The stop token is the last one when finish_reason is `stop`."""
    logprobs: np.ndarray
    """Log-prob of each token, float32 `[T]`."""
    finish_reason: str
    """Reason why the completion ended: `stop`, `length` or `abort` (partial output)."""
    versions: np.ndarray
    """Policy version that produced each token, int32 `[T]`; it never decreases from one token to the next."""
    routes: np.ndarray | None = None
    """Experts that the model's routers chose, `[P + T - 1 - routes_from, layers, k]` (see `codecs.routes`): one route
    for each token of the prompt and the completion from `SamplingParams.routes_from` on, except for the last token. A
    route belongs to the policy version of the next token, because it affects the log-prob of that token. None if the
    engine records no routes, or if the completion has no tokens."""
    masks: np.ndarray | None = None
    """Sets of tokens from which the tokens were drawn, as a stream of uint8 (see `codecs.tokens.masks`). None if the
    request asked for none (`SamplingParams.masked`), or if the completion has no tokens."""

    @staticmethod
    def empty() -> Completion:
        """Return a completion without tokens, for a request that was aborted before its first token."""
        return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", np.zeros(0, np.int32))


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine since its start, its size and its load. The engine updates them in place."""

    batches: int = 0
    """Number of batches decoded (`hf`) or requests answered (other engines)."""
    rows: int = 0
    """Number of completions returned."""
    tokens: int = 0
    """Number of response tokens returned."""
    busy_s: float = 0.0
    """Seconds during which the engine was generating."""
    prompt_tokens: int = 0
    """Number of prompt tokens of the samples returned, counted for each sample; 0 for engines that reuse no keys and
    values of earlier prompts."""
    cached_tokens: int = 0
    """Number of these tokens whose keys and values the engine already had."""
    cache_tokens: int = 0
    """Number of tokens for which the engine's prefix cache has room, which is constant; 0 for none."""
    drafts: int = 0
    """Number of model steps of all samples that could check drafted tokens; 0 without speculative decoding."""
    accepted_tokens: int = 0
    """Number of drafted tokens that these steps accepted."""
    in_flight: int = 0
    """Number of samples that an engine actor is generating for all of its callers, at its latest reply."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """Report on switching an engine to new weights: how long it took and which requests it affected."""

    version: int
    """Version that the engine serves now."""
    pause_s: float
    """Seconds from the start of the commit until the engine had stopped generating with the old version."""
    load_s: float
    """Seconds spent on loading the received weights into the parameters; with `staging: none` this includes the
    transfer."""
    kept: int
    """Number of requests in flight that continued with the new weights."""
    aborted: int
    """Number of requests that the commit ended."""


class BadSchema(ValueError):
    """Raised when an engine cannot restrict a completion to a JSON schema (`SamplingParams.schema`)."""


class EngineBroken(RuntimeError):
    """Raised when an engine holds no complete version of the weights. A commit failed half-way, or `sleep` dropped
    them. After a failed commit requests wait for the next complete version; after `sleep` they are refused with this
    error."""


class EngineDied(RuntimeError):
    """Raised when the process that hosts an engine is gone or no longer answers. The message names the engine and says
    what is known about the cause."""


class Generator(Protocol):
    """Protocol of an engine that turns prompt token ids into sampled completions. Environments and rollout workers use
    no other part of an engine.

    Methods are asynchronous and requests run concurrently.
    """

    @property
    def version(self) -> int:
        """Policy version of the weights that will sample the next token."""
        ...

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return `params.n` completions of the prompt, in order. The engine batches concurrent calls.

        request_id: must be unique among the requests in flight. If a failed commit has left the engine without a
        complete version of the weights, requests wait for the next commit.

        Raises ValueError if prompt + max_new_tokens exceed the context (the message gives the lengths) or the id is
        already in flight, EngineBroken if `sleep` has dropped the weights, EngineDied if the engine's process is gone,
        and RuntimeError if the engine is asleep or closed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request. Its `generate` call returns the tokens generated so far, with finish_reason `abort`. Unknown
        ids are ignored."""
        ...


class WeightHost(Protocol):
    """Protocol of an engine that serves one version of the weights and can receive the next. A weight update uses no
    other part of an engine."""

    @property
    def version(self) -> int:
        """Version of the weights that the engine serves."""
        ...

    @property
    def num_workers(self) -> int:
        """Number of engine processes that receive weights: the tensor-parallel size for vLLM, else 1."""
        ...

    async def prepare_weights(self, update: WeightUpdate) -> Prepared:
        """Receive and verify the new version `update`. The engine continues to serve the old version, and nothing else
        changes.

        An engine without room for a second copy (`staging: none`) only joins the transfer here, and receives the
        weights in `commit_weights`. If the engine already serves this version, it counts as staged and nothing is
        received. An engine that holds no complete version accepts any version.

        Raises WeightTransferError if the transfer fails (the received data is discarded), and ValueError for missing,
        unknown or misshapen parameters or for a version below the current one.
        """
        ...

    async def commit_weights(
        self, version: int, in_flight: PauseMode = "wait", kv: KeysAndValues = "recompute"
    ) -> CommitReport:
        """Start serving the prepared `version`: pause, replace all parameters, resume. Every token generated from then
        on carries `version`, including tokens of requests that were in flight and continue.

        in_flight: treatment of running requests. kv: treatment of the keys and values of requests that continue;
        engines without keys and values (`scripted`) ignore it.

        A sleeping engine allocates only the memory of its weights and stays asleep; `wake` allocates the rest.

        Does nothing if the engine already serves `version`. Raises ValueError if `version` is not the prepared one.
        Without staging it may raise WeightTransferError; the engine then holds no complete version, and its requests,
        including those in flight, wait for the next commit.
        """
        ...

    async def verify_weights(self, digests: ParameterDigests) -> int:
        """Compare the served weights with the trainer's `digests`, and return how many were compared. It compares all
        weights that the engine keeps in the form in which they were sent. The engine must not generate tokens during
        the comparison: pause it before the commit.

        Raises ValueError if the engine does not serve the version of `digests`, and EngineBroken, which names a weight,
        if a weight differs. The engine then has no complete version: its requests, including those in flight, wait for
        the next commit, which may be of the same version.
        """
        ...

    async def drop_weights(self, version: int) -> None:
        """Discard a prepared version, or abort its transfer if it is still being received. The engine continues to
        serve the current version. Idempotent."""
        ...


class Sleeper(Protocol):
    """Protocol of an engine that can be paused, and put to sleep to free its memory."""

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop generating until `resume`. After this call has returned, no token is generated, and new requests wait.
        mode: treatment of requests in flight; see PauseMode."""
        ...

    async def resume(self) -> None:
        """Continue generating after `pause`. Idempotent."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Free memory and refuse requests until `wake`. Level 1 keeps the weights in host memory. Level 2 drops them,
        so a version must be committed, before or after `wake`, before the engine can answer requests. Engines that
        cannot free memory only refuse requests. Idempotent."""
        ...

    async def wake(self) -> None:
        """Undo `sleep`: allocate the memory again and accept requests. Idempotent."""
        ...

    async def memory(self) -> ProcessMemory:
        """Return the memory that the engine's processes hold now, asleep or awake. Raises EngineDied if the engine's
        process is gone."""
        ...


RowScores = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Scores of the W wanted tokens of a row: their log-probs, float32 `[W]`, the ids of the k most likely tokens at their
positions, int32 `[W, k]`, and the log-probs of these, float32 `[W, k]`."""


@runtime_checkable
class Scorer(Protocol):
    """Protocol of an engine that says how likely its model finds given tokens, such as a teacher."""

    async def score(
        self, rows: Sequence[np.ndarray], wanted: Sequence[np.ndarray], top_k: int, temperature: float
    ) -> list[RowScores]:
        """Return the scores of the wanted tokens of each row, each given the tokens before it in the row.

        rows: token ids of each row, int32 `[L]`. wanted: mask of each row's wanted tokens, uint8 `[L]`; 0 at its first
        token. top_k: number of most likely tokens at each position. Logits are divided by `temperature`. Raises
        ValueError for a row that does not fit into the model's context or has unknown tokens.
        """
        ...


@runtime_checkable
class BaseKeeper(Protocol):
    """Protocol of an engine that can send the base of its adapters, which it keeps unchanged, to train workers."""

    async def offer_base(self) -> WeightOffer | None:
        """Begin to send parts of the base to processes that ask for them. Returns where; None without adapters."""
        ...

    async def end_offer(self) -> None:
        """Stop sending the base. Idempotent."""
        ...


class ServingEngine(Generator, Protocol):
    """Protocol of an engine as the actor that generates with it sees it. It has counters, can die, and is closed at the
    end. A `Router` in front of several engines also implements it."""

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine since its start."""
        ...

    @property
    def progress(self) -> int:
        """Number that changes whenever the engine generates tokens or receives a bucket (piece) of a weight update.
        Tokens of requests that it has not answered yet count too.

        Raises EngineDied if the engine's own process is known to be gone.
        """
        ...

    @property
    def died(self) -> str:
        """Reason why the engine has died; "" if it is alive. A dead engine never answers again."""
        ...

    async def close(self) -> None:
        """Shut the engine down. Requests in flight raise an error or return the tokens generated so far. Idempotent."""
        ...


class GenerationEngine(ServingEngine, WeightHost, Sleeper, Protocol):
    """Protocol of a complete engine: it generates, takes new weights, and can pause and sleep."""
