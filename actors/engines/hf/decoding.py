"""Decodes batches of requests for the `hf` engine into sampled tokens, their log-probs and versions.

`model.generate` would prefill a prompt once for each of its samples and would keep computing finished rows until the
whole batch ends. Here a prompt is prefilled once for all its samples, and finished rows leave the batch. Log-probs are
gathered step by step, so that no [steps, B, V] tensor is held. The loop can also stop between two steps, let the
weights change, and continue. `Pending` is one unanswered request, and `Batch` is a set of requests that are decoded
together.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from transformers import DynamicCache

from ....codecs.tokens.masks import encode_sets
from ..protocol import Completion, EngineStats, KeysAndValues, SamplingParams
from ..token_sampling import StopTexts, sample
from .adapters import Adapter
from .model import RouteRecorder, cache_argument
from .pictures import Pictures, feature_places, join_pictures, picture_arguments, picture_positions

COMPACT_BELOW = 0.75
"""Share of running rows in the key-value cache below which finished rows are removed from it. They are not removed one
by one, because each removal copies the cache."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One prompt of a decoding batch, with the random-number keys of its samples."""

    prompt_ids: np.ndarray
    """Token ids of the prompt, int64 `[L]`, L >= 1."""
    keys: np.ndarray
    """Key of the random-number stream of each of the n samples (from `token_sampling.row_keys`), uint64 `[n]`."""
    own_tokens: np.ndarray
    """Tokens of the prompt that are no features of pictures in any case (`SamplingParams.own_tokens`), bool `[L]`."""
    routes_from: int = 0
    """Index of the first token whose route is wanted (`SamplingParams.routes_from`)."""
    pictures: Pictures | None = None
    """Pictures of the prompt; None if it has none."""


class Decoding:
    """Decodes one batch of requests. Only one thread may use it at a time. Its device memory is freed when the object
    is deleted."""

    def __init__(
        self,
        model: Any,
        requests: Sequence[DecodeRequest],
        params: SamplingParams,
        stop_ids: np.ndarray,
        stop_texts: StopTexts | None = None,
        recorder: RouteRecorder | None = None,
    ) -> None:
        """Set the batch up without computing anything.

        params: sampling parameters of all requests; its `n`, `seed`, `stop` and `routes_from` are not read. model: a
        Hugging Face causal LM in eval mode. stop_ids: ids of tokens that end a row and are kept in it, int64.
        stop_texts: finder of texts that end a row; None when no text does. recorder: recorder of the routes of `model`;
        None if completions have no routes.
        """
        self._model = model
        self._requests = requests
        self._params = params
        self._recorder = recorder
        self._routes: list[np.ndarray] = []
        """Routes of the forward passes so far. The first entry has the routes of the padded prompts, `[requests, width,
        layers, k]`. Each later entry has the routes of a decoding step's input tokens, `[rows, layers, k]`. Empty
        without a recorder."""
        self._rows = _Rows(requests, params.max_new_tokens, stop_ids, stop_texts)
        self._window: _Window | None = None
        self._tokens: torch.Tensor | None = None
        """Last sampled token of each row in the cache, int64 `[B]`, which is the input of the next forward pass; None
        before the first step."""
        self._step = 0

    @property
    def num_steps(self) -> int:
        """Number of decoding steps so far. It may be read while another thread decodes."""
        return self._step

    @torch.inference_mode()
    def run(self, version: int, interrupt: threading.Event) -> bool:
        """Decode until all rows have ended, or stop before the next step once `interrupt` is set. Returns whether all
        rows have ended.

        version: policy version of the weights that the model computes with, which may change only between two calls.
        The forward pass and the sampling of a token happen within the same call, so the recorded version of each token
        is exact.
        Keys and values of earlier tokens are recomputed only after `forget_keys_and_values`.
        """
        rows = self._rows
        while self._step < self._params.max_new_tokens and rows.running.any():
            if interrupt.is_set():
                return False
            window = self._advance()
            tokens, logprobs, allowed = sample(window.logits, self._params, rows.keys[window.rows], self._step)
            rows.record(window.rows, self._step, tokens.cpu().numpy(), logprobs.cpu().numpy(), version)
            if allowed is not None:
                rows.record_sets(window.rows, allowed)
            self._tokens = tokens
            self._step += 1
        return True

    def forget_keys_and_values(self) -> None:
        """Drop all keys and values. The next step recomputes them with the weights that the model has then, for the
        prompt and all tokens of every running row. Must not be called during `run`."""
        self._window = None

    def _advance(self) -> _Window:
        """Run the forward pass that computes the logits of the next tokens. The first call prefills the prompts."""
        if self._window is None or self._tokens is None:
            self._window = self._prefilled()
            self._note_routes(self._window)
            return self._window
        live = self._rows.running[self._window.rows]
        if live.sum() < COMPACT_BELOW * len(live):
            keep = np.flatnonzero(live)
            self._window.keep(keep)
            self._tokens = self._tokens[torch.from_numpy(keep).to(self._tokens.device)]
        self._window.advance(self._tokens)
        self._note_routes(self._window)
        return self._window

    def _note_routes(self, window: _Window) -> None:
        """Keep the routes of a forward pass. The first pass has the routes of all prompts. Of a later pass, only the
        routes of each row's last token are kept, because any other tokens in it were recomputed."""
        if self._recorder is None:
            return
        if not self._routes:
            self._routes.append(self._recorder.take(len(self._requests)))
            return
        chosen = self._recorder.take(len(window.rows))
        routes = np.zeros((len(self._rows.running), *chosen.shape[2:]), chosen.dtype)
        routes[window.rows] = chosen[:, -1]
        self._routes.append(routes)

    def _prefilled(self) -> _Window:
        """Compute all keys and values from the start. Before the first decoding step, each prompt is computed once for
        all its rows. Later, the prompt and the tokens of each running row are computed."""
        rows, prompts = self._rows, [request.prompt_ids for request in self._requests]
        shown = [(request.pictures, request.own_tokens) for request in self._requests]
        owners = np.repeat(np.arange(len(prompts)), [len(request.keys) for request in self._requests])
        if not self._step:
            return _Window(self._model, prompts, shown, owners, np.arange(len(owners)))
        live = np.flatnonzero(rows.running)
        known = [np.concatenate([prompts[owners[row]], rows.tokens[row, : self._step]]) for row in live]
        return _Window(self._model, known, [shown[owners[row]] for row in live], np.arange(len(live)), live)

    def end(self, request: int) -> None:
        """Abort the running rows of the request with index `request`. Must not be called during `run`."""
        self._rows.end(request)

    def completions(self, request: int) -> list[Completion]:
        """Return the completions of the request with index `request`, in order. Must not be called during `run`.

        Raises FloatingPointError when the model's logits were not finite.
        """
        completions = self._rows.completions(request)
        if self._recorder is None:
            return completions
        first = int(self._rows.bounds[request])
        return [
            replace(one, routes=self._row_routes(request, row, len(one.token_ids)))
            for row, one in enumerate(completions, start=first)
        ]

    def _row_routes(self, request: int, row: int, num_tokens: int) -> np.ndarray | None:
        """Return the routes of one row, from the first token whose route is wanted; None if the row has no tokens."""
        if not num_tokens:
            return None
        prompts, *steps = self._routes
        asked = self._requests[request]
        prompt = prompts[request, prompts.shape[1] - len(asked.prompt_ids) :]
        response = [step[None, row] for step in steps[: num_tokens - 1]]
        return np.concatenate([prompt, *response])[asked.routes_from :]


class _Rows:
    """Tokens, log-probs and versions of every row of the batch. The rows are the samples of all requests in order."""

    def __init__(
        self, requests: Sequence[DecodeRequest], max_new_tokens: int, stop_ids: np.ndarray, stop_texts: StopTexts | None
    ) -> None:
        self.bounds = np.cumsum([0, *(len(request.keys) for request in requests)])
        self.keys = np.concatenate([request.keys for request in requests])
        self.stop_ids = stop_ids
        self.stop_texts = stop_texts
        shape = (len(self.keys), max_new_tokens)
        self.tokens = np.zeros(shape, dtype=np.int32)
        self.logprobs = np.zeros(shape, dtype=np.float32)
        self.versions = np.zeros(max_new_tokens, dtype=np.int32)
        """Policy version at each decoding step. All rows start together, so all tokens of one step have the same
        version."""
        self.lengths = np.zeros(len(self.keys), dtype=np.int64)
        self.reasons = np.full(len(self.keys), "length", dtype="U6")
        self.running = np.ones(len(self.keys), dtype=bool)
        self.sets: list[list[np.ndarray]] = [[] for _ in self.keys]
        """Ids of the tokens from which each token of each row was drawn; [] if no masks are wanted."""
        self.lost_at: dict[int, int] = {}
        """Rows with a log-prob that is not finite: row index -> policy version of the first such token."""

    def record(self, rows: np.ndarray, step: int, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Store the tokens and log-probs of one step for `rows`, and mark the rows that ended. A row ends with a stop
        token or stop text."""
        active = self.running[rows]
        written = rows[active]
        self.tokens[written, step] = tokens[active]
        self.logprobs[written, step] = kept = logprobs[active]
        if not np.isfinite(kept).all():
            for row in written[~np.isfinite(kept)].tolist():
                self.lost_at.setdefault(row, version)
        self.versions[step] = version
        self.lengths[written] = step + 1
        stops = (tokens[active, None] == self.stop_ids).any(axis=1)
        if self.stop_texts is not None:
            stops |= self.stop_texts.ended([self.tokens[row, : step + 1] for row in written])
        stopped = written[stops]
        self.reasons[stopped] = "stop"
        self.running[stopped] = False

    def record_sets(self, rows: np.ndarray, allowed: torch.Tensor) -> None:
        """Store from which tokens the tokens of one step were drawn. allowed: bool `[len(rows), V]`."""
        owner, ids = (part.cpu().numpy() for part in allowed.nonzero(as_tuple=True))
        parts = np.split(ids, np.searchsorted(owner, np.arange(1, len(rows))))
        for row, part in zip(rows.tolist(), parts, strict=True):
            self.sets[row].append(part)

    def _masks(self, row: int) -> np.ndarray | None:
        sets = self.sets[row][: self.lengths[row]]
        if not sets:
            return None
        sizes = np.array([len(one) for one in sets], np.int64)
        return encode_sets(self.tokens[row, : len(sets)], np.concatenate(sets), sizes)

    def end(self, request: int) -> None:
        own = slice(self.bounds[request], self.bounds[request + 1])
        self.reasons[own][self.running[own] & (self.lengths[own] < self.tokens.shape[1])] = "abort"
        self.running[own] = False

    def completions(self, request: int) -> list[Completion]:
        own = range(self.bounds[request], self.bounds[request + 1])
        lost = [self.lost_at[row] for row in own if row in self.lost_at] if self.lost_at else []
        if lost:
            raise FloatingPointError(f"the model's logits are not finite under policy version {min(lost)}")
        return [
            Completion(
                token_ids=self.tokens[row, : self.lengths[row]].copy(),
                logprobs=self.logprobs[row, : self.lengths[row]].copy(),
                finish_reason=str(self.reasons[row]),
                versions=self.versions[: self.lengths[row]].copy(),
                masks=self._masks(row),
            )
            for row in own
        ]


class _Window:
    """The B rows that are still in the key-value cache, and the logits of their next token."""

    def __init__(
        self,
        model: Any,
        known: Sequence[np.ndarray],
        shown: Sequence[tuple[Pictures | None, np.ndarray]],
        owners: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Run a forward pass over the token sequences `known`, each int64 `[L]`. Several rows may share one of them.

        shown: pictures of each sequence, and which tokens of its prompt stand for themselves. owners: index of each
        row's sequence in `known`, int64 `[B]`. rows: number of each row in its batch, int64 `[B]`.
        """
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.cached = {str(cache_argument(type(model))): self.cache}
        lengths = np.array([len(ids) for ids in known])
        width = int(lengths.max())
        ids = np.zeros((len(known), width), dtype=np.int64)
        # Padding on the left puts every row's next token into the last column.
        mask = np.arange(width) >= (width - lengths)[:, None]
        ids[mask] = np.concatenate(known)
        device = model.device
        # Without padding no mask is needed, and attention without one is faster.
        self.mask = None if mask.all() else torch.from_numpy(mask).to(device=device, dtype=torch.int64)
        tokens, pictures = torch.from_numpy(ids).to(device), join_pictures([one for one, _ in shown])
        positions, arguments = torch.from_numpy(np.maximum(mask.cumsum(axis=1) - 1, 0)), dict[str, Any]()
        if pictures is not None:
            sampled = np.ones_like(mask)  # All tokens after the prompt are.
            for row, first, (_, own) in zip(sampled, width - lengths, shown, strict=True):
                row[first : first + len(own)] = own
            places, every = feature_places(model, ids, mask, pictures, sampled)
            spread = picture_positions(model, ids, mask, pictures, places)
            positions = positions if spread is None else spread  # In time, height and width, `[3, N, L]`.
            pictures = replace(pictures, places=None if every else torch.from_numpy(places))
            arguments = picture_arguments(model, tokens, pictures.to(device))
        self.next_position = positions.view(-1, *positions.shape[-2:]).amax((0, 2)).to(device)[:, None] + 1
        self.logits = self._forward(tokens, positions.to(device), **arguments)
        self.rows = np.arange(len(known))
        self.keep(owners)
        self.rows = rows

    def keep(self, indices: np.ndarray) -> None:
        """Replace the cached rows by those at `indices`, in that order. An index that occurs several times duplicates
        its row."""
        self.rows = self.rows[indices]
        at = torch.from_numpy(indices).to(self.model.device)
        # `reorder_cache` copies whole rows. `batch_select_indices` copies number by number, which takes six times as
        # long on a CPU.
        self.cache.reorder_cache(cast(torch.LongTensor, at))
        self.logits = self.logits[at]
        self.next_position = self.next_position[at]
        if self.mask is not None:
            self.mask = self.mask[at]

    def advance(self, tokens: torch.Tensor) -> None:
        """Run a forward pass over one more token for each row. tokens: int64 `[B]`."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.logits = self._forward(tokens[:, None], self.next_position)
        self.next_position = self.next_position + 1

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, **pictures: Any) -> torch.Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **self.cached,
            **pictures,
        )
        return output.logits[:, -1]


class Served(Protocol):
    """Protocol of what answers requests: an engine, or the part of a shared engine that belongs to one run."""

    stats: EngineStats

    @property
    def version(self) -> int: ...

    @property
    def adapter(self) -> Adapter | None:
        """Adapter in service; None for the model alone."""
        ...


@dataclass(slots=True)
class BaseAlone:
    """The model without its adapter."""

    version: int
    stats: EngineStats
    adapter: None = None


class Pending:
    """A generate call that waits for its completions."""

    __slots__ = ("request", "params", "future", "aborted", "served")

    def __init__(self, request: DecodeRequest, params: SamplingParams, future: asyncio.Future, served: Served) -> None:
        """served: what answers the request, an engine or a run's seat in it."""
        self.request = request
        self.params = params
        self.future = future
        self.aborted = False
        self.served = served

    @property
    def batch_key(self) -> tuple:
        """Sampling parameters that must be equal in all requests of a batch."""
        p = self.params
        cuts = (p.temperature, p.top_p, p.top_k, p.min_p, p.mask_limit)
        return (id(self.served), cuts, p.max_new_tokens, p.stop_token_ids, p.stop)

    def settle(self, completions: list[Completion]) -> None:
        if not self.future.done():
            self.future.set_result(completions)

    def settle_empty(self) -> None:
        """Answer the request with empty completions. Used for a request that was aborted before its first token."""
        self.settle([Completion.empty() for _ in range(self.params.n)])

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Batch:
    """Requests that are decoded together. Methods are called from the event loop, and never while the decoding thread
    works on the batch (`stepping`)."""

    def __init__(self, pendings: list[Pending]) -> None:
        """pendings: requests with equal `batch_key`."""
        self.pendings = pendings
        self.served = pendings[0].served
        """Engine or seat that answers the requests. The batch has the version and adapter that it has at the start."""
        self.version = self.served.version
        """Policy version of the next token."""
        self.adapter = self.served.adapter
        """The adapter of that version; None if it is a version of the model's own weights."""
        self.params = pendings[0].params
        """Sampling parameters of the first request. All requests of the batch share them, except for `n` and `seed`."""
        self.decoding: Decoding | None = None
        self.stepping = False
        """True while the decoding thread uses `decoding`."""
        self._open = dict(enumerate(pendings))
        self._counted = False

    @property
    def num_open(self) -> int:
        """Number of requests that are not answered yet."""
        return len(self._open)

    @property
    def done(self) -> bool:
        return not self._open

    def continue_with(self, version: int, adapter: Adapter | None, kv: KeysAndValues) -> None:
        """Generate the next tokens with another version. kv: treatment of the keys and values so far."""
        assert not self.stepping
        self.version, self.adapter = version, adapter
        if kv == "recompute" and self.decoding is not None:
            self.decoding.forget_keys_and_values()

    def settle_aborted(self) -> None:
        """Answer the aborted requests with the tokens generated so far."""
        assert not self.stepping
        for index in [index for index, pending in self._open.items() if pending.aborted]:
            if self.decoding is None:
                self._open.pop(index).settle_empty()
                continue
            self.decoding.end(index)
            self._settle(index)

    def settle(self) -> None:
        """Answer all requests. Must be called only after all their rows have ended."""
        for index in list(self._open):
            self._settle(index)

    def take_back(self) -> list[Pending]:
        """Return the requests that are not answered yet. They begin again in another batch."""
        assert not self.stepping
        left, self._open = list(self._open.values()), {}
        return left

    def _settle(self, index: int) -> None:
        assert self.decoding is not None
        stats = self.served.stats
        pending = self._open.pop(index)
        try:
            completions = self.decoding.completions(index)
        except FloatingPointError as error:
            pending.fail(error)
            return
        stats.batches += not self._counted
        self._counted = True
        stats.rows += len(completions)
        stats.tokens += sum(len(completion.token_ids) for completion in completions)
        pending.settle(completions)

    def fail(self, error: Exception) -> None:
        """Make every unanswered request raise `error` in its caller."""
        for pending in self._open.values():
            pending.fail(error)
        self._open.clear()
