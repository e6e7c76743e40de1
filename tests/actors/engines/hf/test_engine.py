"""Tests of the hf engine beyond the contract: log-probs against forward passes, batching, aborts and bad input."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.hf.model import cache_argument
from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.tests.actors.engines.hf.hf_steps import PROMPTS, Steps, forward_logprobs
from headrace.tests.waiting import until


def generate(engine: HfEngine, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        return await asyncio.gather(
            *(engine.generate(f"p{index}", prompt, params) for index, prompt in enumerate(prompts))
        )

    return asyncio.run(run())


@pytest.fixture(scope="module")
def engine(model_folder: str) -> HfEngine:
    return HfEngine(model_folder)


def test_an_answer_ends_at_the_tokenizer_s_end_that_no_config_names(model_folder: str, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "config.json", tmp_path / "generation_config.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    [rows] = generate(HfEngine(str(tmp_path)), SamplingParams(n=32, max_new_tokens=40), PROMPTS[:1])
    assert "stop" in {row.finish_reason for row in rows}
    for row in rows:
        assert 2 not in row.token_ids[:-1] and (row.finish_reason == "stop") == (row.token_ids[-1] == 2)


@pytest.fixture(scope="module")
def model(model_folder: str) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_forward_pass(engine: HfEngine, model: Qwen3ForCausalLM, temperature: float) -> None:
    results = generate(engine, SamplingParams(n=6, max_new_tokens=24, temperature=temperature))
    reasons = set()
    for prompt, completions in zip(PROMPTS, results, strict=True):
        assert len(completions) == 6
        for completion in completions:
            reasons.add(completion.finish_reason)
            expected = forward_logprobs(model, prompt, completion.token_ids, temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
            assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == 2)
            assert (completion.finish_reason == "length") == (
                len(completion.token_ids) == 24 and completion.token_ids[-1] != 2
            )
            assert 2 not in completion.token_ids[:-1]
            assert completion.token_ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
    assert reasons == {"stop", "length"}, "the fixture should show both ends"


def test_greedy_equals_transformers_generate(engine: HfEngine, model: Any) -> None:
    results = generate(engine, SamplingParams(max_new_tokens=12, temperature=0.0))
    for prompt, (completion,) in zip(PROMPTS, results, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False
        )
        assert completion.token_ids.tolist() == expected[0, len(prompt) :].tolist()


def test_a_sample_does_not_depend_on_its_batch(engine: HfEngine, model_folder: str) -> None:
    params = SamplingParams(n=3, max_new_tokens=10)
    together = generate(engine, params)
    before = torch.random.get_rng_state()
    small = HfEngine(model_folder, max_batch=3)
    again = generate(small, params)
    assert small.stats.batches == len(PROMPTS)
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator was moved"
    for left, right in zip(together, again, strict=True):
        assert [c.token_ids.tolist() for c in left] == [c.token_ids.tolist() for c in right]
    other = generate(engine, SamplingParams(n=3, max_new_tokens=10, seed=7))
    assert any(
        a.token_ids.tolist() != b.token_ids.tolist()
        for x, y in zip(together, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert len({tuple(c.token_ids) for c in together[0]}) > 1, "samples of a group share their random numbers"


def test_concurrent_calls_share_a_batch_unless_parameters_differ(model_folder: str) -> None:
    engine = HfEngine(model_folder)

    async def run() -> None:
        hot, cold = SamplingParams(n=2, max_new_tokens=4), SamplingParams(n=2, max_new_tokens=4, temperature=0.0)
        await asyncio.gather(*(engine.generate(f"{i}", [5, 13], hot if i % 2 else cold) for i in range(10)))

    asyncio.run(run())
    assert (engine.stats.batches, engine.stats.rows) == (2, 20)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "no tokens"),
        (
            [5] * 60,
            SamplingParams(max_new_tokens=5),
            "60 prompt tokens . 5 new tokens exceed the model's context of 64",
        ),
        ([5, 400], SamplingParams(), "token ids 5..400, expected 0.."),
    ],
)
def test_prompts_that_do_not_fit(engine: HfEngine, prompt: list[int], params: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asyncio.run(engine.generate("x", prompt, params))


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a folder that exists or a hub id"):
        HfEngine(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="has no config.json"):
        HfEngine(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match="could not be loaded as a causal LM"):
        HfEngine(str(tmp_path))


def test_the_cache_is_passed_under_the_name_that_the_model_has_for_it() -> None:
    class Before:  # transformers 5.24
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class Since:
        def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    class Without:
        def forward(self, input_ids: Any) -> None: ...

    assert [cache_argument(model) for model in (Before, Since, Without)] == ["past_key_values", "cache", None]


def test_stop_texts_across_tokens(engine: HfEngine, tokenizer: Any) -> None:
    params = SamplingParams(n=4, max_new_tokens=16, seed=2)
    for prompt, plain in zip(PROMPTS, generate(engine, params), strict=True):
        whole = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in plain]
        stop = next(text[2:5] for text in whole if len(text) > 5)
        stopped = SamplingParams(n=4, max_new_tokens=16, seed=2, stop=(stop, "never in it"))
        again = asyncio.run(engine.generate(f"p{PROMPTS.index(prompt)}", prompt, stopped))
        for before, after in zip(plain, again, strict=True):
            ids = before.token_ids.tolist()
            ends = [
                end for end in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:end], skip_special_tokens=True)
            ]
            assert after.token_ids.tolist() == (ids[: ends[0]] if ends else ids)
            assert after.finish_reason == ("stop" if ends else before.finish_reason)


def test_an_abort_answers_at_the_next_step_and_the_rest_of_the_batch_goes_on(model_folder: str) -> None:
    async def main() -> None:
        engine = HfEngine(model_folder)
        engine._stop_ids = np.array([], dtype=np.int64)
        steps, params = Steps(engine), SamplingParams(n=2, max_new_tokens=20)
        ended = asyncio.create_task(engine.generate("ended", [5], params))
        other = asyncio.create_task(engine.generate("other", [5], params))
        steps.allow(3)
        await until(lambda: steps.begun == 4)
        await engine.abort("ended")
        steps.allow(1)
        assert [len(one.token_ids) for one in await ended] == [4, 4]
        await until(lambda: steps.begun == 5)
        await until(lambda: not engine._interrupt.is_set())
        pause = asyncio.create_task(engine.pause("keep"))
        await until(engine._interrupt.is_set)
        steps.allow(1)
        await pause
        assert steps.begun == 5 and not other.done()
        await engine.abort("other")  # frozen: nothing has to run for it
        assert [len(one.token_ids) for one in await other] == [5, 5]
        assert {one.finish_reason for one in [*await ended, *await other]} == {"abort"}
        assert (engine.stats.batches, engine.stats.rows, engine.stats.tokens) == (1, 4, 18)
        await engine.close()

    asyncio.run(main())
