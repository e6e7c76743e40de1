"""Tests of weight updates of the hf engine: refused weights, commits, and tokens of two versions in one completion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import Completion, EngineBroken, KeysAndValues, SamplingParams
from headrace.actors.weight_sync.transports.protocol import WeightTransferError
from headrace.codecs.weights.parameter_digests import DigestTaker
from headrace.tests.actors.engines.engine_subjects import mixed_logprobs
from headrace.tests.actors.engines.hf.hf_steps import PROMPTS, Steps, forward_logprobs
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver, scaled
from headrace.tests.waiting import until


async def serve(engine: HfEngine, publisher: Publisher, version: int, named: dict[str, torch.Tensor]) -> None:
    await engine.prepare_weights(publisher.publish(version, named))
    await engine.commit_weights(version)


def test_a_sleeping_engine_takes_weights_and_sleeps_on(model_folder: str, tmp_path: Path) -> None:
    async def main() -> None:
        engine = HfEngine(model_folder, receiver=receiver())
        publisher, params = Publisher(tmp_path), SamplingParams(n=2, max_new_tokens=8)
        before = await engine.generate("a", [5], params)
        places = [parameter.data_ptr() % 64 for parameter in engine._model.parameters()]
        for version in (1, 2):
            await engine.sleep(2)
            await serve(engine, publisher, version, scaled(model_folder, 1.0))
            with pytest.raises(RuntimeError, match="asleep"):
                await engine.generate("a", [5], params)
            await engine.sleep(2)
            assert sum(parameter.untyped_storage().nbytes() for parameter in engine._model.parameters()) == 0
            assert (await engine.memory()).host_bytes > 0
            await serve(engine, publisher, version, scaled(model_folder, 1.0))
            await engine.wake()
            assert [parameter.data_ptr() % 64 for parameter in engine._model.parameters()] == places
            after = await engine.generate("a", [5], params)
            assert [c.logprobs.tolist() for c in after] == [c.logprobs.tolist() for c in before]
            assert {version} == {one for c in after for one in c.versions.tolist()}
        await engine.close()
        publisher.close()

    asyncio.run(main())


def test_a_weight_that_changed_after_the_load_is_named_and_nothing_is_served(model_folder: str, tmp_path: Path) -> None:
    async def main() -> None:
        engine, publisher = HfEngine(model_folder, receiver=receiver()), Publisher(tmp_path)
        params = SamplingParams(n=2, max_new_tokens=8)
        before = await engine.generate("a", [5], params)
        named = scaled(model_folder, 1.0)
        taker = DigestTaker(1, list(named))
        for name, tensor in named.items():
            taker.take(name, tensor)
        digests = taker.result()
        with pytest.raises(ValueError, match="version 1 cannot be verified, .* last version in service is 0"):
            await engine.verify_weights(digests)
        await serve(engine, publisher, 1, named)
        assert await engine.verify_weights(digests) == len(named)
        running = asyncio.create_task(engine.generate("running", [5], SamplingParams(max_new_tokens=40)))
        await asyncio.sleep(0)
        await engine.pause("keep")
        with torch.no_grad():
            dict(engine._model.named_parameters())["model.norm.weight"].view(-1)[3] += 1e-3
        message = (
            "engine: weights of version 1: 'model.norm.weight' has digest [0-9a-f]{16} after the load, the trainer's"
        )
        with pytest.raises(EngineBroken, match=message):
            await engine.verify_weights(digests)
        await engine.resume()
        waiting = asyncio.create_task(engine.generate("a", [5], params))
        await asyncio.sleep(0.2)
        assert not waiting.done() and not running.done(), "nothing is generated with wrong weights"
        await serve(engine, publisher, 1, named)
        assert await engine.verify_weights(digests) == len(named)
        assert [c.logprobs.tolist() for c in await waiting] == [c.logprobs.tolist() for c in before]
        assert len(await running) == 1
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
        await serve(engine, publisher, 3, scaled(folder, 2.0))
        with pytest.raises(ValueError, match="got version 2, expected the current 3 or a later one"):
            await engine.prepare_weights(replace(publisher.publish(4, scaled(folder, 2.0)), version=2))
        await engine.close()
        publisher.close()

    asyncio.run(main())


def test_what_was_announced_last_is_wanted(model_folder: str, tmp_path: Path) -> None:
    async def main() -> None:
        engine = HfEngine(model_folder, receiver=receiver())
        silent, publisher = Publisher(tmp_path / "a", timeout_s=60.0), Publisher(tmp_path / "b")
        arriving = asyncio.create_task(engine.prepare_weights(silent.announce(1, scaled(model_folder, 1.1))))
        await until(lambda: engine._incoming._arriving == 1)
        async with asyncio.timeout(20):
            await serve(engine, publisher, 2, scaled(model_folder, 1.2))
            with pytest.raises(WeightTransferError, match="version 1"):
                await arriving
        assert engine.version == 2
        await engine.close()
        silent.close()
        publisher.close()

    asyncio.run(main())


def test_without_a_receiver_weights_never_change(model_folder: str, tmp_path: Path) -> None:
    engine, publisher = HfEngine(model_folder), Publisher(tmp_path)
    with pytest.raises(RuntimeError, match="built without a weight receiver"):
        asyncio.run(engine.prepare_weights(publisher.publish(1, scaled(model_folder, 2.0))))
    publisher.close()


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_kept_requests_go_on_under_the_new_weights_token_by_token(
    model_folder: str, tmp_path: Path, kv: KeysAndValues
) -> None:
    new = scaled(model_folder, 1.5)
    prompt, params = [5, 6, 7], SamplingParams(n=3, max_new_tokens=20)
    longer = [9, 8, 7, 6, 5, 5, 6]

    async def main() -> list[tuple[list[int], Completion]]:
        engine, publisher = HfEngine(model_folder, receiver=receiver()), Publisher(tmp_path)
        engine._stop_ids = np.array([], dtype=np.int64)  # all run to their full length
        steps = Steps(engine)
        running = asyncio.gather(engine.generate("a", prompt, params), engine.generate("b", longer, params))
        steps.allow(5)
        await until(lambda: steps.begun == 6)  # five tokens per row are there, the sixth is on its way
        await engine.prepare_weights(publisher.publish(1, new))
        commit = asyncio.create_task(engine.commit_weights(1, "keep", kv))
        await until(engine._interrupt.is_set)
        late = asyncio.create_task(engine.generate("late", prompt, params))
        steps.allow(100)
        report = await commit
        assert (report.kept, report.aborted, engine.version) == (2, 0, 1)
        short, long = await running
        assert all((one.versions == 1).all() for one in await late)
        await engine.close()
        publisher.close()
        return [*((prompt, one) for one in short), *((longer, one) for one in long)]

    models = [Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval() for _ in range(2)]
    models[1].load_state_dict({**new, "lm_head.weight": new["model.embed_tokens.weight"]})
    for asked, completion in asyncio.run(main()):
        assert completion.versions.tolist() == [0] * 6 + [1] * 14
        assert len(completion.token_ids) == 20 and completion.finish_reason == "length"
        response = completion.token_ids.tolist()
        expected = mixed_logprobs(models, asked, response, 6, kept=kv == "keep")
        other = mixed_logprobs(models, asked, response, 6, kept=kv != "keep")
        assert np.abs(np.subtract(expected, other)).max() > 1e-3, "the two ways could not be told apart"
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
