"""Checks requests, converts them for vLLM, follows them while they run, and turns vLLM's outputs into completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....codecs.tokens.masks import encode_sets
from ....codecs.tokens.routes import RouteSpec, select_moe_layers
from ..protocol import Completion, EngineStats, SamplingParams
from ..stop_tokens import end_tokens, resolve_stops
from ..token_sampling import checked_prompt, row_keys
from . import library
from .logprobs import SET_WIDTH, Taken
from .process import HeldAdapter
from .vision.prepared_pictures import ShownPictures

_REASONS = ("stop", "length", "abort")


class RunningRequest:
    """A `generate` call in progress. It consists of `n` vLLM requests, one per sample, so that each sample has its own
    random numbers."""

    def __init__(
        self, request_id: str, num_samples: int, prefix: str = "", pictures: ShownPictures | None = None
    ) -> None:
        """prefix: beginning of the samples' ids in vLLM, which tells the runs that share an engine apart. pictures:
        those of the prompt; None for none."""
        self.id = request_id
        self.pictures = pictures
        self.sample_ids = [f"{prefix}{request_id}#{sample}" for sample in range(num_samples)]
        self.adapter: HeldAdapter | None = None
        """Version of the adapter with which the request runs; None while it does not run, and for the base alone."""
        self.withdrawn = False
        """True if the request is taken back from vLLM, to begin again from its prompt."""
        self.submitted = False
        """True once the request may be handed to vLLM. Until then, it waits for the engine to accept requests."""
        self.aborted = asyncio.Event()
        self.done = asyncio.Event()

    async def admitted(self, flowing: asyncio.Event) -> None:
        """Wait until the engine accepts requests (`flowing` is set) or this request is aborted. Sets `submitted`,
        unless the request was aborted."""
        while not flowing.is_set() and not self.aborted.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (flowing, self.aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        self.submitted = not self.aborted.is_set()


class RequestChecks:
    """Checks requests against the model and its tokenizer, and converts their sampling parameters."""

    def __init__(
        self, model: str, tokenizer: Any, context: int, vocab_size: int, seed: int, *, routes: bool = False
    ) -> None:
        """tokenizer: tokenizer of `model`; None if it has none. routes: whether vLLM records routes, so that each
        request says which routes it wants."""
        self._routes = routes
        self._context = context
        self._vocab_size = vocab_size
        self._seed = seed
        self._tokenizer = tokenizer
        self._stop_ids = end_tokens(model, tokenizer).ids

    def checked(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> tuple[list[int], SamplingParams]:
        """Check a request, and return the token ids of its prompt and its resolved parameters (see `resolve_stops`).
        Raises ValueError when the prompt is empty, too long or has unknown ids, when a stop text cannot be found, or
        when vLLM would change the requested temperature."""
        params = resolve_stops(params, self._tokenizer)
        prompt = checked_prompt(request_id, prompt_ids, params, context=self._context, vocab_size=self._vocab_size)
        if 0.0 < params.temperature < library.MIN_TEMPERATURE:
            raise ValueError(
                f"sampling temperature: got {params.temperature}, expected 0 (greedy) or at least "
                f"{library.MIN_TEMPERATURE}"
            )
        return prompt.tolist(), params

    def sampling(self, request_id: str, params: SamplingParams, *, with_logprobs: bool) -> list[library.SamplingParams]:
        """Return vLLM's sampling parameters for each sample. Seeds come from `row_keys`, as in the `hf` engine, so that
        a sample does not depend on which other requests run, except in the last bits of floating point.

        with_logprobs: whether vLLM itself returns log-probs.
        """
        keys = row_keys(self._seed if params.seed is None else params.seed, request_id, params.n)
        wanted: dict[str, Any] = {"routed_experts_prompt_start": params.routes_from} if self._routes else {}
        if params.masked:
            wanted["extra_args"] = {SET_WIDTH: min(params.mask_limit, params.top_k or params.mask_limit)}
        return [
            library.SamplingParams(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                min_p=params.min_p,
                seed=int(key) & (2**63 - 1),  # Seeds of torch's generators are signed 64-bit numbers.
                stop=list(params.stop) or None,
                stop_token_ids=sorted({*self._stop_ids, *params.stop_token_ids}),
                # vLLM knows only the tokenizer's end token. All end tokens are in stop_token_ids.
                ignore_eos=True,
                max_tokens=params.max_new_tokens,
                logprobs=0 if with_logprobs else None,
                flat_logprobs=with_logprobs,
                detokenize=bool(params.stop),
                structured_outputs=library.structured_outputs(params.schema),
                output_kind=library.RequestOutputKind.FINAL_ONLY,
                **wanted,
            )
            for key in keys
        ]


def completion(
    output: Any,
    taken: Taken | None,
    versions: np.ndarray,
    request_id: str,
    routes: np.ndarray | None = None,
    *,
    masked: bool = False,
) -> Completion:
    """Convert vLLM's final output of one sample into a Completion. taken: log-probs and sets of its tokens; None if the
    log-probs are in the output. versions: weight version of each token, int32 `[T]`. routes: the sample's routes, see
    `reported_routes`. masked: whether the completion has masks.

    Raises RuntimeError when vLLM ended the sample with an error, and FloatingPointError when log-probs are not finite.
    """
    if output.finish_reason not in _REASONS:
        raise RuntimeError(f"request {request_id!r}: vLLM ended the request with {output.finish_reason!r}")
    tokens = np.array(output.token_ids, dtype=np.int32)
    if taken is None:
        logprobs = np.array(output.logprobs.logprobs if len(tokens) else [], dtype=np.float32)
    else:
        logprobs = taken.logprobs
    assert len(logprobs) == len(tokens) == len(versions), (len(logprobs), len(tokens), len(versions))
    if not np.isfinite(logprobs).all():
        raise FloatingPointError(
            f"request {request_id!r}: log-probs are not finite under policy version {versions.max(initial=-1)}"
        )
    masks = encode_sets(tokens, taken.ids, taken.counts) if taken is not None and masked and len(tokens) else None
    return Completion(tokens, logprobs, output.finish_reason, versions, routes, masks)


def reported_routes(output: Any, num_prompt: int, spec: RouteSpec, request_id: str) -> np.ndarray | None:
    """Return the routes that vLLM reported for one sample; None for a sample without tokens. The shape is `[num_prompt
    + T - 1, layers, k]`.

    num_prompt: number of prompt tokens whose routes were asked for. vLLM reports all decoder layers, with zeros for
    layers without experts; the result leaves those layers out. Tokens whose routes vLLM did not report have missing
    routes in the result. Raises ValueError if vLLM reported more routes than there are tokens, or routes of another
    model.
    """
    if not output.token_ids:
        return None
    wanted = num_prompt + len(output.token_ids) - 1
    if output.routed_experts is None:
        return spec.missing(wanted)
    routes = select_moe_layers(output.routed_experts, spec)
    if len(routes) > wanted:
        raise ValueError(f"request {request_id!r}: vLLM reported {len(routes)} routes, expected {wanted}")
    return np.concatenate([routes, spec.missing(wanted - len(routes))]) if len(routes) < wanted else routes


class BusyClock:
    """Adds to `stats.busy_s` the time during which at least one request runs and the engine is not paused."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._running = 0
        self._paused = False
        self._since = 0.0

    def change(self, running: int = 0, *, paused: bool | None = None) -> None:
        """Record a change. running: number of requests that started, negative for requests that ended. paused: True if
        the engine was paused, False if it was resumed, None if neither happened."""
        now = time.perf_counter()
        if self._running and not self._paused:
            self._stats.busy_s += now - self._since
        self._running += running
        self._paused = self._paused if paused is None else paused
        self._since = now
