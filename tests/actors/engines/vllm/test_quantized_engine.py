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
from headrace.codecs.weights.buckets import checksum
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


def served(worker: Any) -> list[tuple[str, int, int]]:
    """Called in a worker: the name, the address and the checksum of each parameter."""
    named = worker.model_runner.model.named_parameters()
    rows = [(name, one.data_ptr(), one.detach().contiguous().view(-1).view(torch.uint8)) for name, one in named]
    return [(name, address, checksum(row)) for name, address, row in rows]


def choose(worker: Any, written: bool) -> None:
    """Called in a worker: load new versions in place, or layer by layer."""
    loader = worker.weight_transfer_engine.loader
    for layer in loader._layers._parts.layers:
        layer.written = written
    loader._plan = loader._looked = None


def mislead(worker: Any) -> None:
    """Called in a worker: write what is for one layer to the memory of another."""
    layers = worker.weight_transfer_engine.loader._layers
    model, memory = worker.model_runner.model, layers.memory()
    first, second = map(model.get_submodule, (DAMAGED, DAMAGED.replace(".0.", ".1.")))
    other = {first: second, second: first}
    views = {(module, name): view for module, name, view in memory}
    layers.memory = lambda: [(module, name, views[other.get(module, module), name]) for module, name, _ in memory]


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


def test_versions_written_in_place_are_those_that_vllm_would_repack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The views through which they are written are tried at the start. One that is wrong is found by `sync.verify`."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # Functions are sent to workers.
    folder = save_model(tmp_path / "model", "untied")
    plan, publisher = quantization_of(folder, "fp8"), Publisher(tmp_path / "weights")
    greedy = SamplingParams(max_new_tokens=16, temperature=0.0)

    async def main() -> None:
        sync = receiver().sync.model_copy(update={"staging": "none"})  # What arrives is valid for a moment only.
        engine = build(folder, quantization="fp8", receiver=replace(receiver(), sync=sync))

        async def send(version: int, factor: float, way: str) -> Any:
            sent = dict(plan.stream(scaled(folder, factor).items()))
            await engine.prepare_weights(publisher.publish(version, sent))
            await engine.commit_weights(version)
            assert engine.load_way.startswith(way), engine.load_way
            assert await engine.verify_weights(digests_of(version, sent)) == len(sent) - 2
            answer = (await engine.generate(f"{version}", PROMPT, greedy))[0]
            return await engine.call_workers(served), answer.token_ids.tolist(), answer.logprobs.tolist()

        try:
            await send(1, 0.9, "in place by the loaders: the first time; 8-bit layers: 8 in place (transposed)")
            written = await send(2, 0.8, "in place; 8-bit layers: 8 in place (transposed)")
            await engine.call_workers(choose, False)
            assert await send(3, 0.9, "layerwise: ") != written
            assert await send(4, 0.8, "layerwise: ") == written
            await engine.call_workers(choose, True)
            assert await send(5, 0.9, "in place by the loaders: the first time; ") != written
            assert await send(6, 0.8, "in place; ") == written
            await engine.call_workers(mislead)
            await engine.call_workers(choose, True)
            with pytest.raises(EngineBroken, match=f"version 7: '{DAMAGED}.weight' has digest .* and 3 more differ"):
                await send(7, 0.7, "in place by the loaders: the first time; ")
        finally:
            await engine.close()
            publisher.close()

    asyncio.run(main())


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="vLLM has kernels for it on CPUs with AMX")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # vLLM leaves its sockets open.
def test_a_scheme_for_which_vllm_has_no_kernel_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "untied", size=256)
    words = (
        r"got 'fp8_block', expected another one or rollout.engine=hf, because vLLM \S+ does not compute linear layers"
    )
    with pytest.raises(
        RuntimeError, match=rf"rollout.quantization: {words} so on this machine \(Failed to find a kernel"
    ):
        build(folder, quantization="fp8_block")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_odd_sizes_keys_in_8_bits_and_sleep_go_with_8_bit_weights(tmp_path: Path, scheme: Scheme) -> None:
    """The hidden and the intermediate size are no multiples of 16. Versions come while the engine sleeps."""
    folder = save_model(tmp_path / "model", "tied", size=72, head_dim=32, intermediate_size=100, num_attention_heads=3,
                        num_key_value_heads=1)  # fmt: skip
    plan, publisher = quantization_of(folder, scheme), Publisher(tmp_path / "weights")

    async def main() -> None:
        engine = build(folder, quantization=scheme, kv_cache_dtype="fp8")
        try:
            for version, factor in ((1, 0.9), (2, 0.8)):
                sent = dict(plan.stream(scaled(folder, factor).items()))
                await engine.sleep(2)
                await engine.prepare_weights(publisher.publish(version, sent))
                await engine.commit_weights(version)
                await engine.wake()
                assert await engine.verify_weights(digests_of(version, sent)) == len(sent) - 1
                answers = await engine.generate(f"{version}", PROMPT, PARAMS)
                assert distance(folder, plan, factor, answers) < 0.15
        finally:
            await engine.close()
            publisher.close()

    asyncio.run(main())
