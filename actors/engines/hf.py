"""The `hf` engine: Hugging Face causal LMs in this process, batched over concurrent requests. The embedded default."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from .decoding import DecodeRequest, decode
from .parameters import ParameterSet
from .protocol import Completion, EngineStats, SamplingParams
from .sampling import row_keys

_FORWARD_ARGUMENTS = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")


class HfEngine:
    """Decodes in one thread, a batch at a time: what is pending when the thread is free and shares sampling parameters.

    Randomness: a sample is a function of (weights, prompt, `params.seed`, `request_id`, its index); without
    `params.seed` the engine's own `seed` stands in. It does not depend on what else runs in the batch (beyond the last
    bits of floating point), and global random generators are left alone.

    Stop tokens are the model's own end tokens (its generation config) and `params.stop_token_ids`.
    Weights change between two batches, so all tokens of a completion are of one version.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_batch: int = 256,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        """Load `path`, a local folder or a hub id.

        max_batch: rows decoded together; a request is never split, so one with a larger `n` runs alone.
        version: the policy version that the loaded weights stand for.
        Raises ValueError when there is no such model, or it is no decoder-only causal LM.
        """
        if max_batch < 1:
            raise ValueError(f"max_batch: got {max_batch}, expected at least 1")
        self._model: Any = load_model(path, dtype).to(torch.device(device))
        self._device = torch.device(device)
        self._parameters = ParameterSet(self._model)
        self._max_batch = max_batch
        self._seed = seed
        self._version = version
        text_config = self._model.config.get_text_config()
        self._context: int | None = getattr(text_config, "max_position_embeddings", None)
        self._vocab_size: int = self._model.get_input_embeddings().num_embeddings
        self._stop_ids = _model_stop_ids(self._model)
        self._queue: deque[_Pending] = deque()
        self._in_flight: dict[str, _Pending] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-engine")
        self._exclusive = asyncio.Lock()  # held while a batch decodes or weights change
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._serving: asyncio.Task[None] | None = None
        self._unusable = ""
        self.stats = EngineStats()

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """`params.n` completions, in order. Cancelling the call ends the request at the next decoding step.

        Raises ValueError for a prompt that does not fit (empty, too long, unknown ids) or an id that is in flight,
        FloatingPointError when the weights give non-finite logits, RuntimeError when asleep or closed.
        """
        if self._unusable:
            raise RuntimeError(f"request {request_id!r}: the engine is {self._unusable}")
        if request_id in self._in_flight:
            raise ValueError(f"request {request_id!r} is already in flight; ids must be unique")
        prompt = self._checked_prompt(request_id, prompt_ids, params)
        keys = row_keys(self._seed if params.seed is None else params.seed, request_id, params.n)
        pending = _Pending(DecodeRequest(prompt, keys), params, asyncio.get_running_loop().create_future())
        self._in_flight[request_id] = pending
        self._queue.append(pending)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        try:
            return await pending.future
        finally:
            del self._in_flight[request_id]
            if pending.future.cancelled():
                self._drop(pending)

    async def abort(self, request_id: str) -> None:
        pending = self._in_flight.get(request_id)
        if pending is None:
            return
        if self._drop(pending):
            pending.settle([_nothing(self._version) for _ in range(pending.params.n)])

    def _drop(self, pending: _Pending) -> bool:
        """Take a request out of the queue, or have its rows end at the next step. Returns whether it was queued."""
        pending.request.aborted = True
        if pending not in self._queue:
            return False
        self._queue.remove(pending)
        return True

    async def pause(self) -> None:
        self._resumed.clear()
        async with self._exclusive:
            pass

    async def resume(self) -> None:
        self._resumed.set()

    async def load_weights(self, version: int, named: Mapping[str, torch.Tensor]) -> None:
        """Replace all parameters between two batches; see the protocol.

        A tied parameter may come under any of its names, or several times if equal. Other float dtypes are converted.
        Raises ValueError (nothing changed) also when `version` is not above the current one.
        """
        self._check_version(version)
        copies = self._parameters.match(named)
        async with self._exclusive:
            self._check_version(version)
            await self._in_thread(self._parameters.copy, copies)
            self._version = version

    async def sleep(self) -> None:
        """Wait for the running batch, then move the weights to host memory; a no-op in effect on the CPU."""
        async with self._exclusive:
            self._unusable = self._unusable or "asleep: wake it first"
            await self._in_thread(self._move, torch.device("cpu"))

    async def wake(self) -> None:
        async with self._exclusive:
            await self._in_thread(self._move, self._device)
            if self._unusable.startswith("asleep"):
                self._unusable = ""
        if self._queue and (self._serving is None or self._serving.done()):
            self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """End: queued requests raise RuntimeError, running ones return what they have. Idempotent."""
        self._unusable = "closed"
        for pending in self._in_flight.values():
            pending.request.aborted = True
        while self._queue:
            self._queue.popleft().fail(RuntimeError("the engine was closed before the request ran"))
        self._resumed.set()
        async with self._exclusive:
            self._thread.shutdown(wait=False)

    # ---------------------------------------------------------------- the batch loop

    async def _serve(self) -> None:
        """Decode until nothing is pending."""
        await asyncio.sleep(0)  # calls made in the same loop turn join the first batch
        while self._queue and not self._unusable:
            await self._resumed.wait()
            async with self._exclusive:
                if self._resumed.is_set() and self._queue and not self._unusable:
                    await self._run_batch(self._take_batch())

    def _take_batch(self) -> list[_Pending]:
        """The oldest request and, in order, those that share its sampling parameters, up to max_batch rows."""
        first = self._queue[0].batch_key
        batch: list[_Pending] = []
        num_rows = 0
        for pending in self._queue:
            if pending.batch_key == first and (not batch or num_rows + pending.params.n <= self._max_batch):
                batch.append(pending)
                num_rows += pending.params.n
        taken = set(map(id, batch))
        self._queue = deque(pending for pending in self._queue if id(pending) not in taken)
        return batch

    async def _run_batch(self, batch: list[_Pending]) -> None:
        params = batch[0].params
        stop_ids = np.union1d(self._stop_ids, np.array(params.stop_token_ids, dtype=np.int64))
        requests = [pending.request for pending in batch]
        started = time.perf_counter()
        try:
            results = await self._in_thread(decode, self._model, requests, params, stop_ids, self._version)
        except Exception as error:  # belongs to the callers: every one of them gets it
            for pending in batch:
                pending.fail(error)
            return
        for pending, completions in zip(batch, results, strict=True):
            pending.settle(completions)
        self.stats.busy_s += time.perf_counter() - started
        self.stats.batches += 1
        self.stats.rows += sum(len(completions) for completions in results)
        self.stats.tokens += sum(len(c.token_ids) for completions in results for c in completions)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---------------------------------------------------------------- checks

    def _checked_prompt(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> np.ndarray:
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        if prompt.ndim != 1 or not len(prompt):
            raise ValueError(f"request {request_id!r}: the prompt has no tokens, expected at least one")
        if self._context is not None and len(prompt) + params.max_new_tokens > self._context:
            raise ValueError(
                f"request {request_id!r}: {len(prompt)} prompt tokens + {params.max_new_tokens} new tokens exceed "
                f"the model's context of {self._context}"
            )
        if prompt.min() < 0 or prompt.max() >= self._vocab_size:
            raise ValueError(
                f"request {request_id!r}: token ids {prompt.min()}..{prompt.max()}, "
                f"expected 0..{self._vocab_size - 1}; does the tokenizer belong to the model?"
            )
        return prompt

    def _check_version(self, version: int) -> None:
        if version <= self._version:
            raise ValueError(f"weights: got version {version}, expected one above the current {self._version}")


class _Pending:
    """A generate call that waits."""

    __slots__ = ("request", "params", "future")

    def __init__(self, request: DecodeRequest, params: SamplingParams, future: asyncio.Future) -> None:
        self.request = request
        self.params = params
        self.future = future

    @property
    def batch_key(self) -> tuple:
        p = self.params
        return (p.temperature, p.top_p, p.top_k, p.max_new_tokens, p.stop_token_ids)

    def settle(self, completions: list[Completion]) -> None:
        if not self.future.done():
            self.future.set_result(completions)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def _nothing(version: int) -> Completion:
    """The completion of a request that was aborted before its first token."""
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", version)


def _model_stop_ids(model: Any) -> np.ndarray:
    ids = model.generation_config.eos_token_id
    return np.array([] if ids is None else np.atleast_1d(ids), dtype=np.int64)


def load_model(path: str, dtype: torch.dtype) -> torch.nn.Module:
    """A decoder-only causal LM on the CPU, in eval mode, from a local folder or a hub id.

    Raises ValueError in one sentence when there is none, or its forward lacks what cached decoding needs.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir() and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise ValueError(f"model: got {path!r}, expected a folder that exists or a hub id (organisation/name)")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"model: {path!r} has no config.json, expected a Hugging Face model folder")
    disable_progress_bar()  # a bar per actor would be drawn over the run's own display
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder) if folder.is_dir() else path, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model: {path!r} could not be loaded as a causal LM: {reason}") from error
    accepted = inspect.signature(model.forward).parameters
    missing = [name for name in _FORWARD_ARGUMENTS if name not in accepted]
    if missing:
        raise ValueError(
            f"model: {type(model).__name__} takes no {', '.join(missing)}; the hf engine needs a decoder-only model"
        )
    return model.eval()
