"""Brings the log-probs of sampled tokens from a vLLM worker to the engine as one array per sample.

vLLM's own way sends three small arrays for each token of each request through its scheduler, its message queue and its
output loop, which takes as much processor time as all other work for a token. Here the worker keeps the log-prob of
every token that it samples, and the engine takes the log-probs of finished samples with one call for several samples at
once. The values are equal to the last bit, because the same kernels compute them.

    worker    sampler -> log-probs of the step's tokens -> copied to the host without waiting -> one array per request
    engine    sample has ended -> `headrace_take_logprobs(ids, lengths)` -> its array

The sets of tokens from which tokens were drawn, with top-p, top-k or min-p, come the same way. vLLM 0.32 has a way of
its own (`return_sampling_mask`), but only in its second model runner, and only if each request has a top-k.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..config import LogprobWay
from ..protocol import EngineDied, RowScores
from . import library
from .process import VllmProcess

_log = logging.getLogger(__name__)

Locate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Function that locates the token of each request in a step. It takes the number of tokens that each request had before
(int64 `[N]`). It returns the index of each new token in its response (int64 `[N]`), and whether the token belongs to
the response (bool `[N]`). It does not if the step ended within the prompt."""
Sets = tuple[torch.Tensor, torch.Tensor]
"""Sets of a step: the ids of each request's set in ascending order, int32 `[N, width]`, and their number, int32 `[N]`,
of which only those of requests with a width count."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Values that a worker has kept for several samples, one sample after another."""

    logprobs: np.ndarray
    """Log-prob of each token, float32 `[tokens]`."""
    counts: np.ndarray
    """Number of ids in each token's set, int32 `[tokens]`; 0 for a token without a set."""
    ids: np.ndarray
    """Ids of all sets, int32."""

    def split(self, lengths: Sequence[int]) -> list[Taken]:
        """Return what belongs to each sample. lengths: number of tokens of each."""
        ends = np.cumsum(lengths, dtype=np.int64)[:-1]
        borders = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])[ends]
        parts = (np.split(self.logprobs, ends), np.split(self.counts, ends), np.split(self.ids, borders))
        return [Taken(*part) for part in zip(*parts, strict=True)]


class _Row:
    """The log-probs and sets of the tokens of one request, as far as they are known."""

    __slots__ = ("logprobs", "width", "sets")

    def __init__(self, width: int) -> None:
        """width: largest number of ids in the set of a token; 0 if its sets are not wanted."""
        self.logprobs = array("f")
        self.width = width
        self.sets: list[np.ndarray] = []
        """Set of each token; [] with width 0."""

    def add(self, place: int, logprob: float, ids: np.ndarray | None) -> None:
        """Add the token at index `place`."""
        # NaN marks tokens from before this object existed; their log-probs are not known here.
        if place > len(self.logprobs):
            self.logprobs.extend([math.nan] * (place - len(self.logprobs)))
        # A request whose newest token was dropped while it waited samples that token again.
        del self.logprobs[place:]
        self.logprobs.append(logprob)
        if ids is not None:
            del self.sets[place:]
            self.sets += [np.zeros(0, np.int32)] * (place - len(self.sets))
            self.sets.append(ids)


SET_WIDTH = "headrace_set_width"
"""Key of vLLM's `extra_args` of a request with the largest number of ids in the set of a token."""


def _width(params: Any) -> int:
    """Return the largest number of ids of a request's sets; 0 if its sets are not wanted. params: vLLM's parameters."""
    return (getattr(params, "extra_args", None) or {}).get(SET_WIDTH, 0)


@dataclass(frozen=True, slots=True)
class _Step:
    """Log-probs of the tokens of one step, which may still be on their way to the host."""

    rows: tuple[_Row | None, ...]
    """Row of each request, to which the step's tokens are added; None for an unknown request."""
    before: np.ndarray | torch.Tensor
    """Number of tokens that each request had before, int64 `[N]` on the host."""
    locate: Locate
    values: torch.Tensor
    """Log-prob of each token, float32 `[N]` on the host."""
    sets: Sets | None
    """Sets of the step on the host; None if no request wants them."""
    arrived: Any
    """CUDA event after the copies to the host; None on a CPU, where nothing is copied."""


class SampledLogprobs:
    """Keeps the log-probs of the tokens that one worker samples until they are taken."""

    def __init__(self, runner: Any) -> None:
        """Make vLLM's model runner `runner` hand over the log-probs of its tokens from now on. Raises ValueError if
        this class does not know the kind of the runner."""
        self._rows: dict[str, _Row] = {}
        """vLLM's id of a request -> its tokens so far."""
        self._ids: dict[str, str] = {}
        """Id under which a request was submitted -> vLLM's id, which is the same id followed by `-` and eight
        characters."""
        self._steps: deque[_Step] = deque()
        self._release = _tap(runner, self)

    def close(self) -> None:
        """Restore the original model runner, and forget all log-probs."""
        self._release()
        self._rows.clear()
        self._ids.clear()
        self._steps.clear()

    def take(self, ids: Sequence[str], lengths: Sequence[int]) -> Taken:
        """Return what is known of the first `lengths` tokens of each request, and forget the requests.

        ids: ids under which the requests were submitted. An unknown request has no tokens. Raises ValueError if a
        request has fewer tokens.
        """
        self._store(wait=False)
        rows = [self._rows.pop(self._ids.pop(name, ""), None) for name in ids]
        if any(length > (0 if row is None else len(row.logprobs)) for row, length in zip(rows, lengths, strict=True)):
            # This is rare, because tokens that the engine has seen are usually copied by now.
            self._store(wait=True)
        found, counts, sets = [np.zeros(0, np.float32)], [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
        for name, row, length in zip(ids, rows, lengths, strict=True):
            values = np.array(() if row is None else row.logprobs, np.float32)[:length]
            if len(values) < length:
                raise ValueError(f"log-probs of {name!r}: the worker has {len(values)} of {length} tokens")
            found.append(values)
            own = [] if row is None else row.sets[:length]
            counts.append(np.array([len(one) for one in own] + [0] * (length - len(own)), np.int32))
            sets += own
        return Taken(*map(np.concatenate, (found, counts, sets)))

    def keep(
        self,
        rows: tuple[_Row | None, ...],
        before: np.ndarray | torch.Tensor,
        locate: Locate,
        values: torch.Tensor,
        sets: Sets | None,
    ) -> None:
        """Take the tokens of a step of N requests.

        rows: their rows. before: number of tokens that each request had before. values: log-prob of each new token,
        float32 `[N]`. sets: see `Cut.taken`.
        """
        self._store(wait=False)
        arrived = None
        if values.is_cuda:
            # The copies go to pinned memory without blocking, so the host does not wait.
            values = values.to("cpu", non_blocking=True)
            before = before.to("cpu", non_blocking=True) if isinstance(before, torch.Tensor) else before
            if sets is not None:
                sets = sets[0].to("cpu", non_blocking=True), sets[1].to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._steps.append(_Step(rows, before, locate, values, sets, arrived))

    def row(self, request: str | None, width: Callable[[], int]) -> _Row | None:
        """Return the row of a request, a new one for a new request; None for an unknown one. width: returns the largest
        number of ids of its sets."""
        if request is None:
            return None
        row = self._rows.get(request)
        if row is None:
            name, row = request.rpartition("-")[0], _Row(width())
            self._rows.pop(self._ids.get(name, ""), None)  # If an id is reused, it belongs to the newer request.
            self._ids[name], self._rows[request] = request, row
        return row

    def _store(self, *, wait: bool) -> None:
        """Write the log-probs that have arrived on the host into their requests' arrays. With `wait`, wait for all of
        them."""
        while self._steps:
            step = self._steps[0]
            if step.arrived is not None:
                if not wait and not step.arrived.query():
                    return
                step.arrived.synchronize()
            self._steps.popleft()
            places, ours = step.locate(np.asarray(step.before))
            sets: Sequence[np.ndarray | None] = [None] * len(step.rows)
            if step.sets is not None:  # They are copied, so that the array of the whole step is freed.
                ids, counts = step.sets[0].numpy(), step.sets[1].tolist()
                sets = [one[:count].copy() for one, count in zip(ids, counts, strict=True)]
            known = zip(step.rows, places.tolist(), ours.tolist(), step.values.tolist(), sets, strict=True)
            for row, place, own, value, found in known:
                if row is not None and own:
                    row.add(place, value, found if row.width else None)


class Cut:
    """Cuts the distributions of a step at the widths of its requests, and keeps which tokens are left.

    It stands in place of the function with which vLLM's sampler applies top-k and top-p, the last before it draws.
    """

    def __init__(self, sampler: Any) -> None:
        """sampler: vLLM's module that applies top-k and top-p. Raises ValueError if it is of an unknown kind."""
        self._module: Any = sys.modules[type(sampler).__module__]
        self._inner: Any = getattr(self._module, _APPLY, None)
        if self._inner is None:
            raise ValueError(f"sampling masks: vLLM's {type(sampler).__name__} has no function {_APPLY}")
        setattr(self._module, _APPLY, self._apply)
        self._widths: list[int] = []
        self._sets: Sets | None = None

    def begin(self, rows: Sequence[_Row | None]) -> None:
        """Begin a step with these requests."""
        self._widths = [0 if row is None else row.width for row in rows]

    def taken(self) -> Sets | None:
        """End the step, and return its sets; None if no request wants them."""
        sets, self._sets, self._widths = self._sets, None, []
        return sets

    def release(self) -> None:
        """Restore vLLM's function."""
        setattr(self._module, _APPLY, self._inner)

    def _apply(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = self._inner(logits, *args, **kwargs)
        if not any(self._widths) or len(self._widths) != len(logits):
            return logits
        values, ids = logits.topk(min(max(self._widths), logits.shape[-1]), dim=-1)
        own = None if len(set(self._widths)) == 1 else torch.tensor(self._widths, device=logits.device)[:, None]
        if own is not None:
            values = values.masked_fill(torch.arange(values.shape[1], device=logits.device) >= own, -torch.inf)
        kept = torch.full_like(logits, -torch.inf).scatter_(-1, ids, values)
        if own is not None:
            kept = torch.where(own.gt(0), kept, logits)
        cut = values == -torch.inf
        ordered = ids.int().masked_fill_(cut, torch.iinfo(torch.int32).max).sort(-1).values
        self._sets = ordered, (~cut).sum(-1, dtype=torch.int32)
        return kept


_APPLY = "apply_top_k_top_p"


def _tap(runner: Any, kept: SampledLogprobs) -> Callable[[], None]:
    if hasattr(runner, "input_batch") and hasattr(runner, "discard_request_mask"):
        return _tap_first(runner, kept)
    if hasattr(runner, "req_states") and hasattr(runner, "sample"):
        return _tap_second(runner, kept)
    raise ValueError(
        f"log-probs of sampled tokens: got vLLM's model runner {type(runner).__name__}, expected one with the "
        "attributes of GPUModelRunner; `headrace doctor` names the versions of vLLM that were tested"
    )


def _tap_first(runner: Any, kept: SampledLogprobs) -> Callable[[], None]:
    sampler, requests = runner.sampler, getattr(runner, "requests", {})
    inner, cut = sampler.sample, Cut(sampler.topk_topp_sampler)

    def width(request: str) -> int:
        return _width(getattr(requests.get(request), "sampling_params", None))

    def sample(logits: torch.Tensor, metadata: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        batch = runner.input_batch
        if metadata is not batch.sampling_metadata:  # These are dummy requests with which vLLM warms up its sampler.
            return inner(logits, metadata, *args, **kwargs)
        count = batch.num_reqs
        rows = tuple(kept.row(one, partial(width, one)) for one in batch.req_ids[:count])
        cut.begin(rows)
        try:
            tokens, every = inner(logits, metadata, *args, **kwargs)
        finally:
            sets = cut.taken()
        # `every` is None if all requests are greedy.
        scores = sampler.compute_logprobs(logits) if every is None else every
        before, prompts = (
            counts[:count].astype(np.int64) for counts in (batch.num_tokens_no_spec, batch.num_prompt_tokens)
        )
        ours = ~runner.discard_request_mask.np[:count]
        values = scores.gather(-1, tokens.long()[:, None])[:, 0]
        kept.keep(rows, before, lambda before: (before - prompts, ours), values, sets)
        return tokens, every

    def release() -> None:
        del sampler.sample  # Deleting the attribute restores the class's own method.
        cut.release()

    sampler.sample = sample
    return release


def _tap_second(runner: Any, kept: SampledLogprobs) -> Callable[[], None]:
    """Tap vLLM's second model runner. Its sampler returns logits, and its token positions are only on the GPU."""
    sampler, states = runner.sampler, runner.req_states
    whole, inner, add, cut = runner.sample, sampler.sample, sampler.add_request, Cut(sampler)
    batches: list[Any] = []
    widths: dict[int, int] = {}

    def add_request(index: int, *args: Any, **kwargs: Any) -> Any:
        params = kwargs.get("sampling_params", args[-1] if args else None)
        widths[index] = _width(params)
        return add(index, *args, **kwargs)

    def sample_batch(hidden: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append(batch)
        try:
            return whole(hidden, batch, *args, **kwargs)
        finally:
            batches.clear()

    def sample(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not batches:  # These are dummy requests with which vLLM warms up its sampler.
            return inner(*args, **kwargs)
        batch = batches[0]
        index = batch.idx_mapping_np
        rows = tuple(
            kept.row(states.index_to_req_id.get(number), partial(widths.get, number, 0)) for number in index.tolist()
        )
        cut.begin(rows)
        try:
            tokens, logits = inner(*args, **kwargs)
        finally:
            sets = cut.taken()
        prompts, known = (counts.np[index].astype(np.int64) for counts in (states.prompt_len, states.prefill_len))
        values = library.token_logprobs(logits, tokens.long().view(-1))
        before = batch.seq_lens[: len(index)].long()
        kept.keep(rows, before, lambda before: (before - prompts, before >= known), values, sets)
        return tokens, logits

    runner.sample, sampler.sample, sampler.add_request = sample_batch, sample, add_request

    def release() -> None:
        del runner.sample, sampler.sample, sampler.add_request
        cut.release()

    return release


class LogprobTaker:
    """Takes the log-probs of finished samples from the first worker of an engine. Calls that are made at the same time
    share one call of the worker."""

    def __init__(self, process: VllmProcess, way: LogprobWay, hindrance: str) -> None:
        """hindrance: reason why only vLLM's own way is possible; "" if there is none."""
        self._process = process
        self._way: LogprobWay = "vllm" if hindrance else way
        self._hindrance = hindrance
        self._start: asyncio.Task[None] | None = None
        self._wanted: dict[str, tuple[int, asyncio.Future[Taken] | None]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def way(self) -> str:
        """Way in which log-probs come: `arrays`, or `vllm` with or without a reason after it. It no longer changes once
        a request has been answered."""
        return f"vllm: {self._hindrance}" if self._hindrance else self._way

    async def keeps(self) -> bool:
        """Return whether the worker keeps the log-probs of samples submitted now, so that `take` can return them.
        Otherwise requests must ask vLLM for log-probs. The first call makes the worker begin."""
        if self._start is None:
            self._start = asyncio.create_task(self._begin())
        await asyncio.shield(self._start)
        return self._way != "vllm"

    async def change(self, way: LogprobWay) -> None:
        """Switch to another way of taking log-probs, for benchmarks. No request may be running."""
        self._way, self._hindrance = way, ""
        self._start = asyncio.create_task(self._begin())
        await asyncio.shield(self._start)

    async def _begin(self) -> None:
        try:
            await self._process.call("headrace_keep_logprobs", self._way != "vllm")
        except RuntimeError as error:
            if self._way != "auto" or isinstance(error, EngineDied):
                raise
            self._way, self._hindrance = "vllm", str(error)
            _log.warning("log-probs come in vLLM's own way, which is slower: %s", error)

    async def take(self, sample_id: str, num_tokens: int) -> Taken:
        """Return what the worker has kept of the first `num_tokens` tokens of a sample. Raises EngineDied if a process
        of vLLM has died, and RuntimeError if the worker does not have it."""
        future: asyncio.Future[Taken] = asyncio.get_running_loop().create_future()
        self._ask(sample_id, num_tokens, future)
        return await future

    def forget(self, sample_id: str) -> None:
        """Make the worker forget a sample whose log-probs are not wanted."""
        self._ask(sample_id, 0, None)

    def _ask(self, sample_id: str, num_tokens: int, future: asyncio.Future[Taken] | None) -> None:
        self._wanted[sample_id] = (num_tokens, future)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._take_all())

    async def _take_all(self) -> None:
        """Take all requested log-probs. Errors are raised in the calls that wait; `forget` does not wait for an
        answer."""
        while self._wanted:
            wanted, self._wanted = self._wanted, {}
            lengths = [length for length, _ in wanted.values()]
            try:
                found = await self._process.call("headrace_take_logprobs", list(wanted), lengths, returns=Taken)
                parts = found[0].split(lengths)
            except Exception as error:
                for _, future in wanted.values():
                    if future is not None and not future.done():
                        future.set_exception(error)
                continue
            for (_, future), part in zip(wanted.values(), parts, strict=True):
                if future is not None and not future.done():
                    future.set_result(part)

    async def close(self) -> None:
        """Wait for the calls in progress. Idempotent."""
        await asyncio.gather(*(task for task in (self._start, self._task) if task is not None), return_exceptions=True)


# ---------------- vLLM gives log-probs of given tokens as those of a prompt.


class RowScorer:
    """Scores rows of tokens with one vLLM request for each, all of them at the same time."""

    def __init__(self, process: VllmProcess) -> None:
        self._process = process
        self._count = 0

    async def score(self, rows: Sequence[np.ndarray], wanted: Sequence[np.ndarray], top_k: int) -> list[RowScores]:
        """Return the scores of the wanted tokens of each row, in order; see `Scorer.score`. Raises
        library.EngineDeadError when vLLM's engine process has died, and RuntimeError if vLLM leaves out a score."""
        # vLLM generates at least one token, which is dropped.
        params = library.SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=top_k,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
            output_kind=library.RequestOutputKind.FINAL_ONLY,
        )
        first, self._count = self._count, self._count + len(rows)
        names = [f"score {first + index}" for index in range(len(rows))]
        tasks = [asyncio.ensure_future(self._one(*each, params)) for each in zip(names, rows, wanted, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, name: str, row: np.ndarray, wanted: np.ndarray, params: Any) -> RowScores:
        found = None
        async for output in self._process.generate(name, row.tolist(), params):
            found = output.prompt_logprobs
        if found is None or len(found) != len(row):
            raise RuntimeError(
                f"{name}: vLLM gave log-probs of {0 if found is None else len(found)} of {len(row)} tokens"
            )
        return row_scores(found, wanted, params.prompt_logprobs)


def row_scores(found: Any, wanted: np.ndarray, top_k: int) -> RowScores:
    """Return the scores of a row's wanted tokens. found: vLLM's flat log-probs of the row, which have at each position
    but the first the token itself, and after it the `top_k` most likely ones."""
    starts = np.array(found.start_indices, np.int64)[np.flatnonzero(wanted)]
    places = starts[:, None] + np.arange(top_k + 1)
    ids, values = np.array(found.token_ids, np.int32)[places], np.array(found.logprobs, np.float32)[places]
    return values[:, 0], ids[:, 1:], values[:, 1:]
