"""vLLM with 8-bit weights: what is sent is what its kernels compute with, and nothing else is served."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.actors.engines.hf.quantized_layers import quantization_of
from headrace.actors.engines.protocol import EngineBroken, SamplingParams
from headrace.codecs.weights.parameter_digests import DigestTaker, ParameterDigests
from headrace.codecs.weights.quantization import Quantization, Scheme
from headrace.tests.actors.engines.vllm.builder import build, save_model
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver, scaled

pytestmark = pytest.mark.vllm
PROMPT, PARAMS = [5, 6, 7, 13], SamplingParams(n=2, max_new_tokens=16)
EMULATING_WORKER = "headrace.tests.actors.engines.vllm.quantized.emulating_worker.EmulatingWorker"
DAMAGED = "model.layers.0.self_attn.o_proj"


def damage(worker: Any, name: str) -> str:
    """Called in a worker: change what the layer `name` computes with, and return the form in which it keeps that."""
    model = worker.model_runner.model
    layer = model.get_submodule(name)
    if not layer.weight.numel():  # Only the kernel has it: let it compute with the weight of another layer.
        layer.scheme.kernel.dnnl_handler = model.get_submodule(name.replace(".0.", ".1.")).scheme.kernel.dnnl_handler
    else:
        layer.weight.data[3, 4] = 0.5 * layer.weight.data[3, 4].float() + 1
    if hasattr(layer := model.get_submodule(name.partition(".self_attn")[0]).mlp, "experts"):
        layer.experts.routed_experts.w13_weight.data[3, 4, 5] ^= 1
    return ", ".join(sorted(model.headrace_layers.ways))


def damage_scales(worker: Any, name: str) -> None:
    """Called in a worker."""
    worker.model_runner.model.get_submodule(name).weight_scale.data[5] *= 1.01


def digests_of(version: int, sent: Mapping[str, torch.Tensor]) -> ParameterDigests:
    taker = DigestTaker(version, frozenset(sent))
    for name, tensor in sent.items():
        taker.take(name, tensor)
    return taker.result()


def distance(folder: str, plan: Quantization, factor: float, answers: list[Any]) -> float:
    """The mean distance of log-probs from those of transformers with the rounded weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = plan.restored(dict(plan.stream(scaled(folder, factor).items())))
    found = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        for one in answers:
            ids = torch.tensor([[*PROMPT, *one.token_ids.tolist()]])
            table = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            found.append(table.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy() - one.logprobs)
    return float(np.abs(np.concatenate(found)).mean())


@pytest.mark.parametrize(
    ("kind", "tp", "scheme", "ways"),
    [
        ("untied", 1, "int8", "by the kernel"),
        pytest.param("tied", 1, "fp8", "transposed", marks=pytest.mark.slow),
        pytest.param("moe", 1, "int8", "as sent, by the kernel", marks=pytest.mark.slow),
        pytest.param("moe", 2, "int8", "as sent, by the kernel", marks=pytest.mark.slow),
    ],
)
def test_what_was_sent_is_what_kernels_compute_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tp: int, scheme: Scheme, ways: str
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # Functions are sent to workers.
    if kind == "moe":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what vLLM imports
            monkeypatch.setattr("headrace.actors.engines.vllm.process.WORKER", EMULATING_WORKER)
    folder = save_model(tmp_path / "model", kind)
    plan, publisher = quantization_of(folder, scheme), Publisher(tmp_path / "weights", tp)

    async def main() -> None:
        sync = receiver().sync.model_copy(update={"verify": "full"})  # Then workers with parts of weights take digests.
        engine = build(folder, quantization=scheme, tp=tp, receiver=replace(receiver(), sync=sync))
        try:
            assert distance(folder, plan, 1.0, await engine.generate("first", PROMPT, PARAMS)) < 0.1
            sent = dict(plan.stream(scaled(folder, 0.8).items()))
            for version in (1, 2, 3):
                await engine.prepare_weights(publisher.publish(version, sent))
                await engine.commit_weights(version)
                digests = digests_of(version, sent)
                copied = 4 if kind == "moe" else 1 + (kind == "untied")  # CPUs multiply with copies of them.
                assert await engine.verify_weights(digests) == len(sent) - copied
                if version == 1:
                    answers = await engine.generate("second", PROMPT, PARAMS)
                    assert distance(folder, plan, 0.8, answers) < 0.1 < distance(folder, plan, 1.0, answers)
                    assert await engine.call_workers(damage, DAMAGED) == [ways] * tp
                    more = ", and 1 more differ" if kind == "moe" else ""
                    with pytest.raises(EngineBroken, match=f"version 1: '{DAMAGED}.weight' has digest .*{more}"):
                        await engine.verify_weights(digests)
                elif version == 2:
                    await engine.call_workers(damage_scales, DAMAGED)
                    with pytest.raises(EngineBroken, match=f"version 2: '{DAMAGED}.weight(_scale)?' has digest"):
                        await engine.verify_weights(digests)
            with pytest.raises(ValueError, match=f"parameter '{DAMAGED}.weight_scale' was not sent"):
                left = {name: one for name, one in sent.items() if name != f"{DAMAGED}.weight_scale"}
                await engine.prepare_weights(publisher.publish(4, left))
            with pytest.raises(ValueError, match=r"has dtype torch.float32, expected torch\.(int8|float8_e4m3fn)"):
                await engine.prepare_weights(publisher.publish(4, scaled(folder, 1.0)))
            scales = f"{DAMAGED}.weight_scale"
            with pytest.raises(ValueError, match=f"'{scales}' has numbers that are not finite and positive"):
                await engine.prepare_weights(publisher.publish(4, {**sent, scales: sent[scales] * 0}))
            answers = await engine.generate("third", PROMPT, PARAMS)
            assert all((one.versions == 3).all() for one in answers)
            later = dict(plan.stream(scaled(folder, 0.9).items()))
            await engine.prepare_weights(publisher.publish(4, {**later, scales: sent[scales]}))
            await engine.commit_weights(4)
            with pytest.raises(EngineBroken, match=f"version 4: '{scales}' has digest"):
                await engine.verify_weights(digests_of(4, later))
        finally:
            await engine.close()
            publisher.close()

    asyncio.run(main())
