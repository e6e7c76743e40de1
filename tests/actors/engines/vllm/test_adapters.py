"""Tests of adapters in the vllm engine: each version in a slot of its own, refused, verified and removed."""

from __future__ import annotations

import asyncio
import copy
import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from headrace.actors.adapters.base_digest import base_digest
from headrace.actors.adapters.spec import AdapterSlots, AdapterSpec, tensor_names
from headrace.actors.engines.protocol import Completion, EngineBroken, SamplingParams
from headrace.actors.weight_sync.transports.protocol import WeightUpdate
from headrace.codecs.weights.parameter_digests import DigestTaker, ParameterDigests
from headrace.tests.actors.engines.adapter_faults import FAULTS, AdapterSync, check
from headrace.tests.actors.engines.vllm.conftest import Subject

pytestmark = [pytest.mark.vllm, pytest.mark.processes]
PROMPT = [5, 6, 7, 13]
LONG_PROMPT = [5 + i % 30 for i in range(300)]
SHORT = SamplingParams(n=2, max_new_tokens=12)
RANK, ALPHA = 4, 6.0
Tensors = dict[str, torch.Tensor]


class Adapted(Subject):
    """An engine with two slots, and adapters of its model."""

    build_options = {"adapters": AdapterSlots(RANK, 2)}

    @property
    def base(self) -> str:
        return base_digest(self.model_folder)

    def adapter(self, seed: int, *, scale: float = 0.3, rank: int = RANK) -> Tensors:
        """Random matrices for all linear layers except the output layer."""
        generator, named = torch.Generator().manual_seed(seed), {}
        for module, layer in self.model.named_modules():
            if isinstance(layer, torch.nn.Linear) and module != "lm_head":
                first, second = tensor_names(module)
                named[first] = scale * torch.randn(rank, layer.in_features, generator=generator)
                named[second] = scale * torch.randn(layer.out_features, rank, generator=generator)
        return named

    def announce(self, version: int, named: Tensors, **spec: Any) -> WeightUpdate:
        update = self.publisher.publish(version, named)
        return replace(update, adapter=AdapterSpec(**{"rank": RANK, "alpha": ALPHA, "base": self.base, **spec}))

    async def commit(self, named: Tensors, *, version: int = 0) -> int:
        version = version or self.engine.version + 1
        assert await self.engine.prepare_weights(self.announce(version, named)) == "staged"
        report = await self.engine.commit_weights(version)
        assert (report.version, report.aborted, report.pause_s) == (version, 0, 0.0)
        return version

    def digests(self, version: int, named: Tensors) -> ParameterDigests:
        taker = DigestTaker(version, list(named))
        for name, tensor in named.items():
            taker.take(name, tensor)
        return taker.result()

    def expect(self, prompt: list[int], completions: list[Completion], named: Tensors, version: int) -> None:
        """Log-probs are those of the base with the adapter merged into it."""
        merged = copy.copy(self)
        merged.model = copy.deepcopy(self.model)
        with torch.no_grad():
            for module, layer in merged.model.named_modules():
                first, second = tensor_names(module)
                if first in named:
                    layer.weight += ALPHA / RANK * named[second] @ named[first]
        for one in completions:
            assert set(one.versions.tolist()) == {version}
            expected = merged.logprobs(prompt, one.token_ids, SamplingParams())
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)


@pytest.fixture(scope="module")
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    kind, tp = getattr(request, "param", ("untied", 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # The tests call functions in the worker.
        made = Adapted(tmp_path_factory.mktemp("vllm-adapters"), kind, tp=tp)
        yield made
        made.close()


def numbers(worker: Any) -> list[int]:
    return sorted(number for number in worker.model_runner.lora_manager._adapter_manager.lora_index_to_id if number)


def repeats(worker: Any) -> bool:
    """Whether the newest adapter was copied into its slot without vLLM."""
    store = worker.model_runner.lora_manager._load_adapter.__self__
    return store._kept[max(store._kept)].memory.repeatable


def damage(worker: Any) -> str:
    """Change one number of the newest adapter's slot of a merged layer."""
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(max(filter(None, manager.lora_index_to_id)))
    name = next(name for name in manager.modules if name.endswith("qkv_proj"))
    manager.modules[name].lora_b_stacked[1][slot, 0, 0, 0] += 0.5
    return name


def test_an_adapter_is_served_as_the_merged_weights_and_its_files_are_never_read(adapted: Adapted) -> None:
    async def main() -> None:
        engine, nothing = adapted.engine, adapted.adapter(1)
        base = await engine.generate("same", PROMPT, SHORT)
        greedy = SamplingParams(max_new_tokens=400, temperature=0.0)
        beside = asyncio.create_task(engine.generate("beside", PROMPT, greedy))
        assert {int(version) for one in base for version in one.versions} == {0}
        for name in nothing:
            if "lora_B" in name:
                nothing[name] = torch.zeros_like(nothing[name])
        version = await adapted.commit(nothing)
        assert await engine.verify_weights(adapted.digests(version, nothing)) == len(nothing)
        same = await engine.generate("same", PROMPT, SHORT)
        for one, other in zip(base, same, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist() and (other.versions == version).all()
            assert one.logprobs.tobytes() == other.logprobs.tobytes()
        named = adapted.adapter(2)
        version = await adapted.commit(named)
        assert engine.load_way == "adapter" and all(await engine.call_workers(repeats))
        assert await engine.verify_weights(adapted.digests(version, named)) == len(named)
        for index, prompt in enumerate((PROMPT, LONG_PROMPT)):
            adapted.expect(prompt, await engine.generate(f"{index}", prompt, SHORT), named, version)
        adapted.expect(PROMPT, await beside, {}, 0)  # Its steps were shared with requests of the adapter.
        library = importlib.import_module("headrace.actors.engines.vllm.library")
        assert not os.path.exists(library.adapter_request("any", 1).lora_path)

    adapted.run(main())


def test_requests_finish_with_their_version_and_a_commit_waits_for_a_slot(adapted: Adapted) -> None:
    """Also if the engine is paused, as it is while the driver changes and verifies weights."""

    async def main() -> None:
        engine, named, tasks = adapted.engine, {}, {}
        for seed, prompt, length in ((11, LONG_PROMPT, 120), (12, PROMPT, 450)):
            version = await adapted.commit(adapted.adapter(seed))
            named[version], params = adapted.adapter(seed), SamplingParams(max_new_tokens=length, temperature=0.0)
            tasks[version] = asyncio.create_task(engine.generate(f"long {version}", prompt, params))
            while min([count for _, count in engine.tokens_of_newest()] or [0]) < 2:
                await asyncio.sleep(0.002)
        first, second = tasks
        await engine.pause("keep")
        third = second + 1
        named[third] = adapted.adapter(13)
        await engine.prepare_weights(adapted.announce(third, named[third]))
        waiting = asyncio.create_task(engine.generate("waits", LONG_PROMPT, SHORT))
        commit = asyncio.create_task(engine.commit_weights(third, "keep"))
        await asyncio.wait([commit], timeout=0.05)
        assert not commit.done(), "both slots are in use"
        report = await commit
        assert tasks[first].done() and not waiting.done()
        assert await engine.verify_weights(adapted.digests(third, named[third])) == len(named[third])
        assert not waiting.done()
        await engine.resume()
        adapted.expect(LONG_PROMPT, await waiting, named[third], third)
        [before] = await engine.call_workers(numbers)
        adapted.expect(LONG_PROMPT, await tasks[first], named[first], first)
        adapted.expect(PROMPT, await tasks[second], named[second], second)
        assert (report.kept, len((await tasks[second])[0].token_ids)) == (1, 450)
        await adapted.commit(named[third])
        [after] = await engine.call_workers(numbers)
        assert len(before) == 2 and len(after) == 1 and after[0] > before[1]

    adapted.run(main())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("base", "belongs to a base with digest 00, expected [0-9a-f]{32}, the digest of"),
        ("rank", "has rank 16, expected at most 4, with which the engine was started"),
        ("module", "got matrices for 'model.layers.0.nonsense', which is no module"),
        ("head", "got matrices for 'lm_head', which is no module"),
        ("missing", r"base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight was not sent"),
        ("shape", r"'model.layers.0.self_attn.q_proj' make a weight of shape \(64, 63\), expected \(64, 64\)"),
        ("finite", "model.layers.0.self_attn.q_proj.lora_A.weight has numbers that are not finite"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(adapted: Adapted, what: str, message: str) -> None:
    async def main() -> None:
        engine, named, spec = adapted.engine, adapted.adapter(1), {}
        first, second = tensor_names("model.layers.0.self_attn.q_proj")
        if what == "base":
            spec = {"base": "00"}
        elif what == "rank":
            spec = {"rank": 16}
        elif what in ("module", "head"):
            other = "lm_head" if what == "head" else "model.layers.0.nonsense"
            named |= dict(zip(tensor_names(other), (named[first], named[second]), strict=True))
        elif what == "missing":
            del named[second]
        elif what == "shape":
            named[first] = named[first][:, 1:].clone()
        else:
            named[first][0, 0] = torch.nan
        served = engine.version
        with pytest.raises(ValueError, match=message) as refused:
            await engine.prepare_weights(adapted.announce(served + 1, named, **spec))
        assert "\n" not in str(refused.value)
        with pytest.raises(ValueError, match="expected the prepared one"):
            await engine.commit_weights(served + 1)
        [one] = await engine.generate("still", PROMPT, SamplingParams(max_new_tokens=4))
        assert (one.versions == served).all()

    adapted.run(main())


def test_a_damaged_slot_is_found_and_its_requests_begin_again(adapted: Adapted) -> None:
    async def main() -> None:
        engine, named = adapted.engine, adapted.adapter(21)
        version = await adapted.commit(named)
        digests = adapted.digests(version, named)
        wrong = replace(digests, weights=(replace(digests.weights[0], digest=1),))
        running = asyncio.create_task(engine.generate("begins", PROMPT, SamplingParams(max_new_tokens=150)))
        while not engine.tokens_of_newest() or engine.tokens_of_newest()[0][1] < 1:
            await asyncio.sleep(0.002)
        [layer] = await engine.call_workers(damage)
        with pytest.raises(EngineBroken, match=f"adapter of version {version}: the slot of {layer} differs"):
            await engine.verify_weights(digests)
        assert await engine.call_workers(numbers) == [[]] and not running.done()
        await adapted.commit(named, version=version)
        adapted.expect(PROMPT, await running, named, version)
        assert await engine.verify_weights(digests) == len(named)
        with pytest.raises(EngineBroken, match=f"{digests.weights[0].name!r} has digest"):
            await engine.verify_weights(wrong)
        await adapted.commit(named, version=version)
        with pytest.raises(EngineBroken, match="'other' was not sent"):
            await engine.verify_weights(replace(wrong, weights=(replace(wrong.weights[0], name="other"),)))
        await adapted.commit(named, version=version)

    adapted.run(main())


def test_cached_prefixes_of_versions_do_not_mix(adapted: Adapted) -> None:
    async def main() -> None:
        engine = adapted.engine
        for seed in (31, 32, 31):
            named = adapted.adapter(seed)
            version = await adapted.commit(named)
            for turn in range(2):  # The second finds the prompt of the first in the cache.
                adapted.expect(LONG_PROMPT, await engine.generate(f"{turn}", LONG_PROMPT, SHORT), named, version)

    adapted.run(main())


def test_whole_weights_replace_the_base(adapted: Adapted) -> None:
    async def main() -> None:
        engine = adapted.engine
        version = engine.version + 1
        await engine.prepare_weights(adapted.update())
        await engine.commit_weights(version)
        adapted.expect(PROMPT, await engine.generate("whole", PROMPT, SHORT), {}, version)
        named = adapted.adapter(41)
        version = await adapted.commit(named)
        adapted.expect(PROMPT, await engine.generate("adapted", PROMPT, SHORT), named, version)
        await engine.sleep(2)
        await engine.wake()
        adapted.expect(PROMPT, await engine.generate("awake", PROMPT, SHORT), named, version)

    adapted.run(main())


QUICK = ("bucket damaged", "digests lost", "probe silent")
"""Faults with which `make test` proves that vllm's own code sees them; the others are slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_a_fault_of_a_message_is_refused_by_name(adapted: Adapted, tmp_path: Path, name: str) -> None:
    process = adapted.engine._process
    probe = process.probe

    async def base(prompt: list[int], held: Any) -> Any:
        return await probe(prompt, None)

    sync = AdapterSync(adapted.engine, adapted.model_folder, tmp_path, lambda: patch.object(process, "probe", base))
    adapted.run(check(sync, name, adapted.adapter(51), adapted.adapter(52)))
    sync.close()
