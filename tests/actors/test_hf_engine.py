"""The hf engine: log-probs against forward passes, batching, aborts, weights, bad input. See test_engine_contract."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from headrace.actors.engines.hf import HfEngine
from headrace.actors.engines.protocol import Completion, EngineBroken, SamplingParams
from headrace.tests.actors.weight_updates import Publisher, receiver, scaled

PROMPTS = [[5, 6, 7, 13], [4], [9, 9, 3, 3, 8, 13], [5, 6, 7, 13, 4, 4, 4]]


def generate(engine: HfEngine, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        return await asyncio.gather(
            *(engine.generate(f"p{index}", prompt, params) for index, prompt in enumerate(prompts))
        )

    return asyncio.run(run())


class Steps:
    """Lets an engine's forward passes through by tickets."""

    def __init__(self, engine: HfEngine) -> None:
        self.begun = 0
        self._tickets = threading.Semaphore(0)
        engine._model.register_forward_pre_hook(self._enter)

    def _enter(self, *_: Any) -> None:
        self.begun += 1
        assert self._tickets.acquire(timeout=30.0)

    def allow(self, count: int) -> None:
        for _ in range(count):
            self._tickets.release()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.001)


async def serve(engine: HfEngine, publisher: Publisher, version: int, named: dict[str, torch.Tensor]) -> None:
    await engine.prepare_weights(publisher.publish(version, named))
    await engine.commit_weights(version)


def forward_logprobs(
    model: Qwen3ForCausalLM, prompt: list[int], response: np.ndarray, temperature: float
) -> np.ndarray:
    ids = torch.tensor([[*prompt, *response.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].float() / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def engine(model_folder: str) -> HfEngine:
    return HfEngine(model_folder)


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


def test_stop_tokens_of_the_request(engine: HfEngine) -> None:
    every = tuple(range(3, 42))
    for (completion,) in generate(engine, SamplingParams(max_new_tokens=8, stop_token_ids=every)):
        assert len(completion.token_ids) == 1 or completion.token_ids[-1] in every
        assert completion.finish_reason == "stop"


def test_abort_returns_a_partial_output_and_cancel_frees_the_id(model_folder: str) -> None:
    async def run() -> None:
        engine = HfEngine(model_folder)
        params = SamplingParams(n=64, max_new_tokens=60, stop_token_ids=())
        engine._stop_ids = np.array([], dtype=np.int64)  # nothing ends early: the abort must
        running = asyncio.create_task(engine.generate("a", [5], params))
        queued = asyncio.create_task(engine.generate("b", [5], SamplingParams(n=2, max_new_tokens=60, seed=1, top_k=3)))
        with pytest.raises(ValueError, match="'a' is already in flight"):
            await asyncio.sleep(0)
            await engine.generate("a", [5], params)
        await asyncio.sleep(0.03)
        await engine.abort("b")
        await engine.abort("a")
        await engine.abort("unknown")
        partial, nothing = await running, await queued
        assert {c.finish_reason for c in partial} == {"abort"} and len(partial) == 64
        assert 0 < len(partial[0].token_ids) < 60
        assert [len(c.token_ids) for c in nothing] == [0, 0] and nothing[0].finish_reason == "abort"
        cancelled = asyncio.create_task(engine.generate("a", [5], params))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert len(await engine.generate("a", [5], SamplingParams(max_new_tokens=2))) == 1
        await engine.pause()
        held = asyncio.create_task(engine.generate("a", [5], params))
        await asyncio.sleep(0)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        assert not engine._queue and not engine._in_flight
        await engine.resume()
        await engine.close()
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate("c", [5], params)

    asyncio.run(run())


def test_pause_sleep_wake(model_folder: str) -> None:
    async def run() -> None:
        engine = HfEngine(model_folder)
        await engine.pause()
        waiting = asyncio.create_task(engine.generate("a", [5], SamplingParams(max_new_tokens=2)))
        await asyncio.sleep(0.05)
        assert not waiting.done() and engine.stats.batches == 0
        await engine.resume()
        await waiting
        await engine.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            await engine.generate("a", [5], SamplingParams(max_new_tokens=2))
        await engine.wake()
        await engine.generate("a", [5], SamplingParams(max_new_tokens=2))
        await engine.close()

    asyncio.run(run())


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


def test_sleep_level_2_drops_the_weights_until_a_commit(model_folder: str, tmp_path: Path) -> None:
    async def main() -> None:
        engine = HfEngine(model_folder, receiver=receiver())
        publisher, params = Publisher(tmp_path), SamplingParams(n=2, max_new_tokens=8)
        before = await engine.generate("a", [5], params)
        await engine.sleep(2)
        assert sum(parameter.numel() for parameter in engine._model.parameters()) == 0
        await engine.prepare_weights(publisher.publish(1, scaled(model_folder, 1.0)))
        with pytest.raises(RuntimeError, match="asleep"):
            await engine.commit_weights(1)
        await engine.wake()
        with pytest.raises(EngineBroken, match="its weights were dropped .sleep level 2., commit a version"):
            await engine.generate("a", [5], params)
        await engine.commit_weights(1)
        after = await engine.generate("a", [5], params)
        assert [c.token_ids.tolist() for c in after] == [c.token_ids.tolist() for c in before]
        await engine.close()
        publisher.close()

    asyncio.run(main())


def test_non_finite_weights_raise_instead_of_sampling(model_folder: str, tmp_path: Path) -> None:
    async def main() -> None:
        engine, publisher = HfEngine(model_folder, receiver=receiver()), Publisher(tmp_path)
        await serve(engine, publisher, 1, scaled(model_folder, float("nan")))
        with pytest.raises(FloatingPointError, match="not finite under policy version 1"):
            await engine.generate("a", [5], SamplingParams())
        await engine.close()
        publisher.close()

    asyncio.run(main())


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("send_head", [False, True])
def test_weights_are_replaced_tied_head_included(model_folder: str, tmp_path: Path, send_head: bool) -> None:
    named = scaled(model_folder, 1.1)
    if send_head:
        named["lm_head.weight"] = named["model.embed_tokens.weight"].clone()
    expected = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    expected.load_state_dict({**named, "lm_head.weight": named["model.embed_tokens.weight"]})

    async def main() -> None:
        engine, publisher = HfEngine(model_folder, receiver=receiver()), Publisher(tmp_path)
        await serve(engine, publisher, 3, named)
        for index, prompt in enumerate(PROMPTS):
            (completion,) = await engine.generate(f"p{index}", prompt, SamplingParams(max_new_tokens=8))
            assert engine.version == 3 and (completion.versions == 3).all()
            expected_logprobs = forward_logprobs(expected, prompt, completion.token_ids, 1.0)
            np.testing.assert_allclose(completion.logprobs, expected_logprobs, atol=1e-4)
        await engine.close()
        publisher.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("tied", "change", "message"),
    [
        (False, lambda named: named.pop("lm_head.weight"), "'lm_head.weight' was not sent"),
        (True, lambda named: named.pop("model.norm.weight"), "'model.norm.weight' was not sent"),
        (
            True,
            lambda named: named.update({"model.norm.wieght": torch.ones(32)}),
            "no parameter 'model.norm.wieght'; the nearest is 'model.norm",
        ),
        (
            True,
            lambda named: named.update({"model.norm.weight": torch.ones(31)}),
            r"'model.norm.weight' has shape \(31,\), expected \(32,\)",
        ),
        (
            True,
            lambda named: named.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}),
            "'model.norm.weight' has dtype torch.int32, expected torch.float32",
        ),
        (
            True,
            lambda named: named.update({"lm_head.weight": named["model.embed_tokens.weight"] + 1}),
            "tied in the model but differ",
        ),
    ],
)
def test_wrong_weights_are_named_and_leave_the_old_version(
    model_folder: str, untied_folder: str, tmp_path: Path, tied: bool, change: Callable, message: str
) -> None:
    folder = model_folder if tied else untied_folder
    named = scaled(folder, 2.0)
    change(named)

    async def main() -> None:
        engine, publisher = HfEngine(folder, receiver=receiver()), Publisher(tmp_path)
        before = {name: p.clone() for name, p in engine._model.named_parameters()}
        with pytest.raises(ValueError, match=message):
            await engine.prepare_weights(publisher.publish(1, named))
        with pytest.raises(ValueError, match="got version 1 to commit, expected the prepared one, none"):
            await engine.commit_weights(1)
        assert engine.version == 0
        assert all(torch.equal(before[name], p) for name, p in engine._model.named_parameters())
        await serve(engine, publisher, 2, scaled(folder, 2.0))
        with pytest.raises(ValueError, match="got version 2, expected one above the current 2"):
            await engine.prepare_weights(publisher.publish(2, scaled(folder, 2.0)))
        await engine.close()
        publisher.close()

    asyncio.run(main())


def test_without_a_receiver_weights_never_change(engine: HfEngine, model_folder: str, tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    with pytest.raises(RuntimeError, match="built without a weight receiver"):
        asyncio.run(engine.prepare_weights(publisher.publish(1, scaled(model_folder, 2.0))))
    publisher.close()


def test_kept_requests_go_on_under_the_new_weights_token_by_token(model_folder: str, tmp_path: Path) -> None:
    new = scaled(model_folder, 1.5)
    prompt, params = [5, 6, 7], SamplingParams(n=3, max_new_tokens=20)

    async def main() -> list[Completion]:
        engine, publisher = HfEngine(model_folder, receiver=receiver()), Publisher(tmp_path)
        engine._stop_ids = np.array([], dtype=np.int64)  # all run to their full length
        steps = Steps(engine)
        running = asyncio.create_task(engine.generate("a", prompt, params))
        steps.allow(5)
        await until(lambda: steps.begun == 6)  # five tokens a row are there, the sixth is on its way
        await engine.prepare_weights(publisher.publish(1, new))
        commit = asyncio.create_task(engine.commit_weights(1, "keep"))
        await until(engine._interrupt.is_set)
        late = asyncio.create_task(engine.generate("late", prompt, params))
        steps.allow(100)
        report = await commit
        assert (report.kept, report.aborted, engine.version) == (1, 0, 1)
        completions = await running
        assert all((one.versions == 1).all() for one in await late)
        await engine.close()
        publisher.close()
        return completions

    for completion in asyncio.run(main()):
        assert completion.versions.tolist() == [0] * 6 + [1] * 14
        assert len(completion.token_ids) == 20 and completion.finish_reason == "length"
        expected = mixed_logprobs(model_folder, new, prompt, completion.token_ids.tolist(), change_at=6)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def mixed_logprobs(
    folder: str, new: dict[str, torch.Tensor], prompt: list[int], response: list[int], change_at: int
) -> list[float]:
    """Log-probs of the response when the weights change before its token `change_at`; keys and values are kept."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache, fed, result = None, prompt, []
    for index, token in enumerate(response):
        if index == change_at:
            model.load_state_dict({**new, "lm_head.weight": new["model.embed_tokens.weight"]})
        with torch.no_grad():
            output = model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True)
        cache, fed = output.past_key_values, [token]
        result.append(torch.log_softmax(output.logits[0, -1].float(), dim=-1)[token].item())
    return result


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
