"""Tests of adapters in the hf engine: what they compute, which version a request has, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.adapters.spec import tensor_names
from headrace.actors.engines.hf.adapters import Adapter
from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import Completion, EngineBroken, SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.tests.actors.engines.hf.adapter_updates import RANK, Trainer, adapter, merged, model_of, run
from headrace.tests.actors.engines.hf.hf_steps import PROMPTS, Steps, forward_logprobs
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver, scaled
from headrace.tests.waiting import until

PARAMS = SamplingParams(n=2, max_new_tokens=12, seed=3)
Q_PROJ = "model.layers.0.self_attn.q_proj"
A, B = tensor_names(Q_PROJ)


def generate(engine: HfEngine) -> Any:
    return asyncio.gather(*(engine.generate(f"p{n}", prompt, PARAMS) for n, prompt in enumerate(PROMPTS)))


def flat(answers: list[list[Completion]]) -> list[tuple[list[int], list[float]]]:
    return [(one.token_ids.tolist(), one.logprobs.tolist()) for answer in answers for one in answer]


def versions(answers: list[list[Completion]]) -> set[int]:
    return {version for answer in answers for one in answer for version in one.versions.tolist()}


async def begin(engine: HfEngine) -> tuple[Steps, asyncio.Task[list[Completion]]]:
    """Begin a request, whose fourth step waits to be allowed."""
    steps = Steps(engine)
    running = asyncio.create_task(engine.generate("running", [5], PARAMS))
    steps.allow(3)
    await until(lambda: steps.begun == 4)
    return steps, running


async def freeze(engine: HfEngine, steps: Steps) -> None:
    pausing = asyncio.create_task(engine.pause("keep"))
    await until(engine._interrupt.is_set)
    steps.allow(1)
    await pausing


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "moe", "gpt_oss"])
def test_an_adapter_of_zeros_changes_no_bit_and_another_equals_merged_weights(
    model_folder: str, tmp_path: Path, kind: str, sent: torch.dtype
) -> None:
    folder = model_of(kind, tmp_path / "model", model_folder)
    named = adapter(folder, 1, dtype=sent)

    async def main(engine: HfEngine, trainer: Trainer) -> None:
        base = await generate(engine)
        await trainer.serve(engine, 1, adapter(folder, 1, zero=True, dtype=sent))
        zero = await generate(engine)
        assert flat(zero) == flat(base) and (versions(base), versions(zero)) == ({0}, {1})
        await trainer.serve(engine, 2, named)
        served = await generate(engine)
        assert engine.version == 2 and versions(served) == {2} and flat(served) != flat(base)
        reference = merged(folder, named)
        for prompt, answer in zip(PROMPTS, served, strict=True):
            for one in answer:
                expected = forward_logprobs(reference, prompt, one.token_ids, 1.0)
                np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)

    run(main, folder, tmp_path / "sync")


@pytest.mark.parametrize("pause", ["none", "keep"])
@pytest.mark.parametrize("in_flight", ["keep", "wait"])
def test_a_request_keeps_the_version_with_which_it_began(
    model_folder: str, tmp_path: Path, pause: str, in_flight: Any
) -> None:
    old, new = adapter(model_folder, 1), adapter(model_folder, 2)
    queued_params = replace(PARAMS, max_new_tokens=11)

    async def main(engine: HfEngine, trainer: Trainer) -> list[list[Completion]]:
        await trainer.serve(engine, 1, old)
        steps, running = await begin(engine)
        queued = asyncio.create_task(engine.generate("queued", [6], queued_params))
        await asyncio.sleep(0)
        await engine.prepare_weights(trainer.publish(2, new))
        if pause == "keep":
            await freeze(engine, steps)
        report = await engine.commit_weights(2, in_flight)  # No step is allowed: the commit waits for none.
        assert (engine.version, report.kept, report.aborted) == (2, 0, 0)
        late = asyncio.create_task(engine.generate("late", [7], PARAMS))
        await asyncio.sleep(0)
        assert not running.done()
        steps.allow(200)
        if pause == "keep":
            assert await engine.verify_weights(trainer.publisher.digests(2)) == len(new)
            await engine.resume()
        return [await running, await queued, await late]

    async def alone(engine: HfEngine, trainer: Trainer) -> list[list[Completion]]:
        await trainer.serve(engine, 1, old)
        first = await engine.generate("running", [5], PARAMS)
        await trainer.serve(engine, 2, new)
        return [first, await engine.generate("queued", [6], queued_params), await engine.generate("late", [7], PARAMS)]

    got = run(main, model_folder, tmp_path / "a", endless=True)
    assert [versions([one]) for one in got] == [{1}, {2}, {2}]
    assert flat(got) == flat(run(alone, model_folder, tmp_path / "b", endless=True))


def test_an_abort_ends_requests_and_later_ones_have_the_new_version(model_folder: str, tmp_path: Path) -> None:
    async def main(engine: HfEngine, trainer: Trainer) -> None:
        await trainer.serve(engine, 1, adapter(model_folder, 1))
        steps, running = await begin(engine)
        await engine.prepare_weights(trainer.publish(2, adapter(model_folder, 2)))
        commit = asyncio.create_task(engine.commit_weights(2, "abort"))
        await until(engine._interrupt.is_set)
        steps.allow(100)
        assert (await commit).aborted == 1
        assert [(len(one.token_ids), one.finish_reason) for one in await running] == [(4, "abort")] * 2
        assert versions([await running]) == {1}
        assert versions([await engine.generate("late", [5], PARAMS)]) == {2}

    run(main, model_folder, tmp_path, endless=True)


def test_a_version_leaves_with_its_last_request_and_a_commit_waits_for_room(model_folder: str, tmp_path: Path) -> None:
    async def main(engine: HfEngine, trainer: Trainer) -> None:
        await trainer.serve(engine, 1, adapter(model_folder, 1))
        assert engine.adapter is not None
        old = weakref.ref(engine.adapter.pairs[Q_PROJ][0])
        steps, running = await begin(engine)
        queued = asyncio.create_task(engine.generate("queued", [6], replace(PARAMS, max_new_tokens=11)))
        await engine.prepare_weights(trainer.publish(2, adapter(model_folder, 2)))
        await freeze(engine, steps)
        with pytest.raises(RuntimeError, match="version 2 finds no room beside version 1, whose requests are frozen"):
            await engine.commit_weights(2, "keep")
        await engine.resume()
        commit = asyncio.create_task(engine.commit_weights(2, "keep"))
        await asyncio.sleep(0.05)
        assert not commit.done() and engine.version == 1
        progress = engine.progress
        steps.allow(200)
        await commit
        assert engine.progress > progress
        assert versions([await running]) == {1} and versions([await queued]) == {2}
        gc.collect()
        assert old() is None

    run(main, model_folder, tmp_path, endless=True, count=1)


@pytest.mark.parametrize(
    ("kind", "spec", "change", "message"),
    [
        ("qwen3", {"base": "0" * 32}, None, "a base model with the digest 0{32}, expected [0-9a-f]{32}, the digest of"),
        ("qwen3", {"rank": 4 * RANK}, None, "got rank 16, expected at most 8"),
        ("qwen3", {"rank": 3}, None, r"lora_A.weight has shape \(4, 32\), expected 3, the adapter's rank"),
        ("qwen3", {}, lambda n: n.update({tensor_names("model.norm")[0]: n[A]}), "'model.norm', which is no module"),
        ("qwen3", {}, lambda n: n.update({Q_PROJ: n[A]}), f"got a tensor '{Q_PROJ}', expected names base_model"),
        ("qwen3", {}, lambda n: n.pop(B), "q_proj.lora_B.weight was not sent"),
        ("qwen3", {}, lambda n: n.update({A: n[A][:, 1:]}), r"lora_A.weight has shape \(4, 31\), expected 32 in dim"),
        ("qwen3", {}, lambda n: n.update({B: n[B][1:]}), r"lora_B.weight has shape \(63, 4\), expected 64 in dim"),
        ("qwen3", {}, lambda n: n[B].view(-1)[3].fill_(float("nan")), "lora_B.weight has numbers that are not finite"),
        (
            "moe",
            {},
            lambda n: [n.pop(name) for name in tensor_names("model.layers.1.mlp.experts.base_layer")],
            "mlp.experts.base_layer has no matrices, expected them, because 'model.layers.1.mlp.experts' has",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    model_folder: str, tmp_path: Path, kind: str, spec: dict[str, Any], change: Callable | None, message: str
) -> None:
    folder = model_of(kind, tmp_path / "model", model_folder)
    named = adapter(folder, 1)
    if change is not None:
        change(named)

    async def main(engine: HfEngine, good: Trainer) -> None:
        trainer = Trainer(tmp_path / "bad", folder, **spec)
        with pytest.raises(ValueError, match=message) as raised:
            await engine.prepare_weights(trainer.publish(1, named))
        assert "\n" not in str(raised.value) and str(raised.value).startswith("adapter: ")
        with pytest.raises(ValueError, match="got version 1 to commit, expected the prepared one, none"):
            await engine.commit_weights(1)
        assert engine.version == 0 and versions([await engine.generate("a", [5], PARAMS)]) == {0}
        await good.serve(engine, 1, adapter(folder, 1))
        trainer.publisher.close()

    run(main, folder, tmp_path / "good")


def test_engines_without_room_refuse_adapters_and_the_scripted_one_takes_any(model_folder: str, tmp_path: Path) -> None:
    named = adapter(model_folder, 1)

    async def main(engine: HfEngine, trainer: Trainer) -> None:
        plain, scripted = (
            HfEngine(model_folder, receiver=receiver()),
            ScriptedEngine(lambda *_: [1], receiver=receiver()),
        )
        trainer.publish(0, named)
        with pytest.raises(ValueError, match="version 0 cannot be verified, because it is served without an adapter"):
            await engine.verify_weights(trainer.publisher.digests(0))
        update = trainer.publish(1, named)
        with pytest.raises(ValueError, match="got an adapter, expected the model's weights, because the engine has no"):
            await plain.prepare_weights(update)
        await scripted.prepare_weights(update)
        await scripted.commit_weights(1)
        assert await scripted.verify_weights(trainer.publisher.digests(1)) == len(named)
        await plain.close()
        await scripted.close()

    run(main, model_folder, tmp_path)


def damage(served: Adapter) -> None:
    served.pairs[Q_PROJ][1].view(-1)[7] += 0.125


def lose(served: Adapter) -> None:
    del served.pairs[Q_PROJ]


def silence(served: Adapter) -> None:
    served.scaling = 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damage, "version 1: '.*q_proj.lora_B.weight' has digest [0-9a-f]{16} after the load, the trainer's is"),
        (lose, "adapter of version 1 differs from the trainer's: '.*q_proj.lora_A.weight' is in one of them only"),
        (silence, "adapter of version 1 has no effect: 16 tokens have the same logits as without it"),
    ],
)
def test_an_adapter_that_is_not_served_as_sent_serves_nothing(
    model_folder: str, tmp_path: Path, dtype: torch.dtype, harm: Callable[[Adapter], None], message: str
) -> None:
    named = adapter(model_folder, 1)

    async def main(engine: HfEngine, trainer: Trainer) -> None:
        await trainer.serve(engine, 1, named)
        before = await engine.generate("a", [5], PARAMS)
        running = asyncio.create_task(engine.generate("running", [6], PARAMS))
        await until(lambda: engine._batch is not None)
        await engine.pause("keep")
        assert engine.adapter is not None
        harm(engine.adapter)
        with pytest.raises(EngineBroken, match=message):
            await engine.verify_weights(trainer.publisher.digests(1))
        await engine.resume()
        waiting = asyncio.create_task(engine.generate("a", [5], PARAMS))
        await asyncio.sleep(0.1)
        assert not waiting.done() and not running.done()
        await trainer.serve(engine, 2, named)
        assert flat([await waiting]) == flat([before]) and versions([await waiting]) == {2}
        assert 2 in versions([await running])  # The request that began with the bad version continues with the good.

    run(main, model_folder, tmp_path, endless=True, dtype=dtype)


def test_sleep_keeps_the_base_and_the_adapter(model_folder: str, tmp_path: Path) -> None:
    async def main(engine: HfEngine, trainer: Trainer) -> None:
        await trainer.serve(engine, 1, adapter(model_folder, 1))
        first = await generate(engine)
        await engine.sleep(2)
        await engine.wake()
        assert flat(await generate(engine)) == flat(first)
        await engine.sleep(2)
        await trainer.serve(engine, 2, adapter(model_folder, 2))
        with pytest.raises(RuntimeError, match="asleep"):
            await engine.generate("a", [5], PARAMS)
        await engine.wake()
        second = await generate(engine)
        assert versions(second) == {2} and flat(second) != flat(first)

    run(main, model_folder, tmp_path)


def test_weights_of_the_whole_model_replace_the_base(model_folder: str, tmp_path: Path) -> None:
    async def main(engine: HfEngine, trainer: Trainer) -> None:
        publisher = Publisher(tmp_path / "whole")
        base = await generate(engine)
        await trainer.serve(engine, 1, adapter(model_folder, 1))
        adapted = await generate(engine)
        steps, running = await begin(engine)
        await engine.prepare_weights(publisher.publish(2, scaled(model_folder, 1.0)))
        commit = asyncio.create_task(engine.commit_weights(2, "keep"))
        await until(engine._interrupt.is_set)
        steps.allow(1000)
        assert (await commit).kept == 1
        assert [one.versions.tolist() for one in await running] == [[1] * 4 + [2] * 8] * 2
        whole = await generate(engine)
        assert flat(whole) == flat(base) and versions(whole) == {2}
        await trainer.serve(engine, 3, adapter(model_folder, 1))
        assert flat(await generate(engine)) == flat(adapted)
        publisher.close()

    run(main, model_folder, tmp_path / "sync", endless=True)
