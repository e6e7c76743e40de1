"""Brings the log-probs of sampled tokens from a vLLM worker to the engine as one array per sample.

vLLM's own way sends three small arrays for each token of each request through its scheduler, its message queue and its
output loop, which takes as much processor time as all other work for a token. Here the worker keeps the log-prob of
every token that it samples, and the engine takes the log-probs of finished samples with one call for several samples at
once. The values are equal to the last bit, because the same kernels compute them.

    worker    sampler -> log-probs of the step's tokens -> copied to the host without waiting -> one array per request
    engine    sample has ended -> `headrace_take_logprobs(ids, lengths)` -> its array
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
Keep = Callable[[Sequence[str | None], "np.ndarray | torch.Tensor", Locate, torch.Tensor], None]
"""Function that takes the tokens of a step: vLLM's id of each of N requests, the number of tokens that each request had
before, a `Locate` function, and the log-prob of each new token, float32 `[N]`."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Log-probs of the tokens of one step, which may still be on their way to the host."""

    rows: tuple[array[float] | None, ...]
    """Array of log-probs of each request, to which the step's are added; None for an unknown request."""
    before: np.ndarray | torch.Tensor
    """Number of tokens that each request had before, int64 `[N]` on the host."""
    locate: Locate
    values: torch.Tensor
    """Log-prob of each token, float32 `[N]` on the host."""
    arrived: Any
    """CUDA event after the copies to the host; None on a CPU, where nothing is copied."""


class SampledLogprobs:
    """Keeps the log-probs of the tokens that one worker samples until they are taken."""

    def __init__(self, runner: Any) -> None:
        """Make vLLM's model runner `runner` hand over the log-probs of its tokens from now on. Raises ValueError if
        this class does not know the kind of the runner."""
        self._rows: dict[str, array[float]] = {}
        """vLLM's id of a request -> log-probs of its tokens so far."""
        self._ids: dict[str, str] = {}
        """Id under which a request was submitted -> vLLM's id, which is the same id followed by `-` and eight
        characters."""
        self._steps: deque[_Step] = deque()
        self._release = _tap(runner, self._keep)

    def close(self) -> None:
        """Restore the original model runner, and forget all log-probs."""
        self._release()
        self._rows.clear()
        self._ids.clear()
        self._steps.clear()

    def take(self, ids: Sequence[str], lengths: Sequence[int]) -> np.ndarray:
        """Return the log-probs of the first `lengths` tokens of each request, and forget the requests. They are
        concatenated in the order of the requests, float32 `[sum of lengths]`.

        ids: ids under which the requests were submitted. An unknown request has no tokens. Raises ValueError if a
        request has fewer tokens.
        """
        self._store(wait=False)
        rows = [self._rows.pop(self._ids.pop(name, ""), None) for name in ids]
        if any(length > (0 if row is None else len(row)) for row, length in zip(rows, lengths, strict=True)):
            # This is rare, because tokens that the engine has seen are usually copied by now.
            self._store(wait=True)
        found = [np.zeros(0, np.float32)]
        for name, row, length in zip(ids, rows, lengths, strict=True):
            values = np.array(() if row is None else row, np.float32)[:length]
            if len(values) < length:
                raise ValueError(f"log-probs of {name!r}: the worker has {len(values)} of {length} tokens")
            found.append(values)
        return np.concatenate(found)

    def _keep(
        self, ids: Sequence[str | None], before: np.ndarray | torch.Tensor, locate: Locate, values: torch.Tensor
    ) -> None:
        self._store(wait=False)
        arrived, rows = None, tuple(map(self._row, ids))
        if values.is_cuda:
            # The copies go to pinned memory without blocking, so the host does not wait.
            values = values.to("cpu", non_blocking=True)
            before = before.to("cpu", non_blocking=True) if isinstance(before, torch.Tensor) else before
            arrived = torch.cuda.Event()
            arrived.record()
        self._steps.append(_Step(rows, before, locate, values, arrived))

    def _row(self, request: str | None) -> array[float] | None:
        if request is None:
            return None
        row = self._rows.get(request)
        if row is None:
            name, row = request.rpartition("-")[0], array("f")
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
            for row, place, own, value in zip(
                step.rows, places.tolist(), ours.tolist(), step.values.tolist(), strict=True
            ):
                if row is None or not own:
                    continue
                # NaN marks tokens from before this object existed; their log-probs are not known here.
                if place > len(row):
                    row.extend([math.nan] * (place - len(row)))
                # A request whose newest token was dropped while it waited samples that token again.
                del row[place:]
                row.append(value)


def _tap(runner: Any, keep: Keep) -> Callable[[], None]:
    if hasattr(runner, "input_batch") and hasattr(runner, "discard_request_mask"):
        return _tap_first(runner, keep)
    if hasattr(runner, "req_states") and hasattr(runner, "sample"):
        return _tap_second(runner, keep)
    raise ValueError(
        f"log-probs of sampled tokens: got vLLM's model runner {type(runner).__name__}, expected one with the "
        "attributes of GPUModelRunner; `headrace doctor` names the versions of vLLM that were tested"
    )


def _tap_first(runner: Any, keep: Keep) -> Callable[[], None]:
    sampler = runner.sampler
    inner = sampler.sample

    def sample(logits: torch.Tensor, metadata: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        tokens, every = inner(logits, metadata, *args, **kwargs)
        batch = runner.input_batch
        if metadata is not batch.sampling_metadata:  # These are dummy requests with which vLLM warms up its sampler.
            return tokens, every
        # `every` is None if all requests are greedy.
        scores = sampler.compute_logprobs(logits) if every is None else every
        count = batch.num_reqs
        before, prompts = (
            counts[:count].astype(np.int64) for counts in (batch.num_tokens_no_spec, batch.num_prompt_tokens)
        )
        ours = ~runner.discard_request_mask.np[:count]
        values = scores.gather(-1, tokens.long()[:, None])[:, 0]
        keep(tuple(batch.req_ids[:count]), before, lambda before: (before - prompts, ours), values)
        return tokens, every

    sampler.sample = sample
    return lambda: delattr(sampler, "sample")  # Deleting the attribute restores the class's own method.


def _tap_second(runner: Any, keep: Keep) -> Callable[[], None]:
    """Tap vLLM's second model runner. Its sampler returns logits, and its token positions are only on the GPU."""
    sampler, states = runner.sampler, runner.req_states
    whole, inner = runner.sample, sampler.sample
    batches: list[Any] = []

    def sample_batch(hidden: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append(batch)
        try:
            return whole(hidden, batch, *args, **kwargs)
        finally:
            batches.clear()

    def sample(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logits = inner(*args, **kwargs)
        if not batches:  # These are dummy requests with which vLLM warms up its sampler.
            return tokens, logits
        batch = batches[0]
        index = batch.idx_mapping_np
        prompts, known = (counts.np[index].astype(np.int64) for counts in (states.prompt_len, states.prefill_len))
        ids = tuple(states.index_to_req_id.get(number) for number in index.tolist())
        values = library.token_logprobs(logits, tokens.long().view(-1))
        keep(ids, batch.seq_lens[: len(index)].long(), lambda before: (before - prompts, before >= known), values)
        return tokens, logits

    runner.sample, sampler.sample = sample_batch, sample

    def release() -> None:
        del runner.sample, sampler.sample

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
        self._wanted: dict[str, tuple[int, asyncio.Future[np.ndarray] | None]] = {}
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

    async def take(self, sample_id: str, num_tokens: int) -> np.ndarray:
        """Return the log-probs of the first `num_tokens` tokens of a sample, float32 `[num_tokens]`. Raises EngineDied
        if a process of vLLM has died, and RuntimeError if the worker does not have them."""
        future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._ask(sample_id, num_tokens, future)
        return await future

    def forget(self, sample_id: str) -> None:
        """Make the worker forget a sample whose log-probs are not wanted."""
        self._ask(sample_id, 0, None)

    def _ask(self, sample_id: str, num_tokens: int, future: asyncio.Future[np.ndarray] | None) -> None:
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
                found = await self._process.call("headrace_take_logprobs", list(wanted), lengths, returns=np.ndarray)
            except Exception as error:
                for _, future in wanted.values():
                    if future is not None and not future.done():
                        future.set_exception(error)
                continue
            parts = np.split(found[0], np.cumsum(lengths[:-1]))
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
