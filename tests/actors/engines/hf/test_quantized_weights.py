"""The hf engine computes with weights that were rounded to 8 bits, and proves that they are those that were sent."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.hf.quantized_layers import quantization_of
from headrace.actors.engines.protocol import EngineBroken, SamplingParams
from headrace.codecs.weights.parameter_digests import DigestTaker
from headrace.codecs.weights.quantization import Scheme
from headrace.tests.actors.engines.hf.hf_steps import forward_logprobs
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver, scaled

PARAMS = SamplingParams(n=2, max_new_tokens=12, seed=3)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_rounded_weights_are_served_and_every_byte_is_compared(
    model_folder: str, tmp_path: Path, scheme: Scheme
) -> None:
    async def main() -> None:
        engine, publisher = HfEngine(model_folder, receiver=receiver(), quantization=scheme), Publisher(tmp_path)
        plan = quantization_of(model_folder, scheme)
        before = await engine.generate("a", [5], PARAMS)
        sent = dict(plan.stream(scaled(model_folder, 1.1).items()))
        taker = DigestTaker(1, frozenset(sent))
        for name, tensor in sent.items():
            taker.take(name, tensor)
        digests = taker.result()
        await engine.prepare_weights(publisher.publish(1, sent))
        await engine.commit_weights(1)
        assert await engine.verify_weights(digests) == len(sent) > len(plan.names) * 2
        after = await engine.generate("a", [5], PARAMS)
        assert np.abs(before[0].logprobs[0] - after[0].logprobs[0]) > 1e-4
        named = dict(engine._model.named_parameters())
        name = min(plan.names)
        assert named[name].equal(plan.restored(sent)[name])
        with torch.no_grad():
            named[name].view(-1)[3] *= 1.3
        with pytest.raises(EngineBroken, match=f"version 1: '{name}' has digest"):
            await engine.verify_weights(digests)
        await engine.prepare_weights(publisher.publish(2, sent))
        await engine.commit_weights(2)
        engine._parameters._scales[name][0] *= 2
        with pytest.raises(EngineBroken, match=f"version 2: '{name}(_scale)?' has digest"):
            await engine.verify_weights(type(digests)(2, digests.weights))
        await engine.prepare_weights(publisher.publish(3, sent))
        await engine.commit_weights(3)
        with pytest.raises(ValueError, match=f"'{name}' came without its scales"):
            await engine.prepare_weights(publisher.publish(4, {n: t for n, t in sent.items() if n != name + "_scale"}))
        for damage in (float("nan"), 0.0, -1.0):
            damaged = {**sent, f"{name}_scale": sent[f"{name}_scale"].clone().index_fill_(0, torch.tensor(2), damage)}
            with pytest.raises(ValueError, match=f"'{name}_scale' has numbers that are not finite and positive"):
                await engine.prepare_weights(publisher.publish(4, damaged))
        assert (await engine.generate("a", [5], PARAMS))[0].versions[0] == 3, "the old version stays"
        later = dict(plan.stream(scaled(model_folder, 1.2).items()))
        taker = DigestTaker(4, frozenset(later))
        for one, tensor in later.items():
            taker.take(one, tensor)
        await engine.prepare_weights(publisher.publish(4, {**later, f"{name}_scale": sent[f"{name}_scale"]}))
        await engine.commit_weights(4)
        with pytest.raises(EngineBroken, match=f"version 4: '{name}_scale' has digest"):
            await engine.verify_weights(taker.result())
        waiting = asyncio.create_task(engine.generate("a", [5], PARAMS))  # Nothing is served until the next version.
        await engine.prepare_weights(publisher.publish(5, later))
        await engine.commit_weights(5)
        assert {int(version) for one in await waiting for version in one.versions} == {5}
        for version, level in ((6, 2), (7, 1)):
            await engine.sleep(level)
            await engine.wake()
            await engine.prepare_weights(publisher.publish(version, later))
            await engine.commit_weights(version)
            assert await engine.verify_weights(replace(taker.result(), version=version)) == len(later)
        await engine.close()
        publisher.close()

    asyncio.run(main())


def test_log_probs_are_those_of_the_rounded_model(model_folder: str) -> None:
    async def main() -> None:
        engine, exact = HfEngine(model_folder, quantization="int8"), HfEngine(model_folder)
        [one] = await engine.generate("a", [5, 7], SamplingParams(max_new_tokens=12, seed=3))
        rounded, own = (forward_logprobs(model._model, [5, 7], one.token_ids, 1.0) for model in (engine, exact))
        np.testing.assert_allclose(one.logprobs, rounded, atol=1e-4)
        assert np.abs(one.logprobs - own).max() > 1e-4, "the trainer, which does not round, gives others"
        await engine.close()
        await exact.close()

    asyncio.run(main())
