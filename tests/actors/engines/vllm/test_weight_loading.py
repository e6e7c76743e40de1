"""Tests of copy plans of vLLM's own loaders in a real worker: repeating the copies equals running the loaders."""

from __future__ import annotations

import asyncio
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.engines.vllm.copy_plan import CopyPlan, PlanRecorder
from headrace.actors.engines.vllm.weight_names import WeightNames
from headrace.codecs.weights.parameter_digests import DigestTaker, compare_digests
from headrace.tests.actors.engines.vllm.builder import build, save_model
from headrace.tests.actors.engines.vllm.test_copy_plan import Fused, record, weights

pytestmark = pytest.mark.vllm


def repeat_plan(worker: Any, folder: str) -> str:
    """Called in a worker: what is wrong; "" when nothing is. The model is fresh, as kernels repack the worker's own."""
    config: Any = importlib.import_module("vllm.config")
    loading: Any = importlib.import_module("vllm.model_executor.model_loader.utils")
    names = WeightNames(folder)

    def sent(seed: int) -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [(name, torch.randn(names.shape(name), generator=generator)) for name in names.required]

    with config.set_current_vllm_config(worker.vllm_config), torch.no_grad():
        model = loading.initialize_model(worker.vllm_config, prefix="fresh")

        def load(weights: list[tuple[str, torch.Tensor]]) -> None:
            model.load_weights(iter(names.checkpoint(weights, ("lm_head",))))

        recorder = PlanRecorder(model)
        for half in (sent(1)[::2], sent(1)[1::2]):
            with recorder.watching(half):
                load(half)
        plan = recorder.plan()
        if not isinstance(plan, CopyPlan):
            return plan
        if not plan.loads(names.required) or not plan.load(sent(2)):
            return "the plan is not of these weights"
        repeated = {name: parameter.clone() for name, parameter in model.named_parameters()}
        load(sent(2))
        different = [name for name, one in model.named_parameters() if not torch.equal(one, repeated[name])]
        return (
            f"{different} differ" if different else read_back(plan, model, sent(2), worker.parallel_config.world_size)
        )


def read_back(plan: CopyPlan, model: torch.nn.Module, sent: list[tuple[str, torch.Tensor]], tp: int) -> str:
    """Return what is wrong with reading the weights back from the model's fused parameters; "" if nothing is."""
    taker = DigestTaker(1, [name for name, _ in sent])
    for name, tensor in sent:
        taker.take(name, tensor)
    count, error = compare_digests(taker.result(), plan.read, "engine")
    if error or (count != len(sent) if tp == 1 else not 0 < count < len(sent)):
        return error or f"{count} of {len(sent)} weights were compared"
    if tp == 1:
        for name, parameter in model.named_parameters():
            for index in (0, parameter.numel() // 2):  # of a fused one, in two of its weights
                kept = parameter.data.view(-1)[index].clone()
                parameter.data.view(-1)[index] += 1
                if not compare_digests(taker.result(), plan.read, "engine")[1]:
                    return f"a change of {name} was not found"
                parameter.data.view(-1)[index] = kept
    return ""


@pytest.fixture(params=[("untied", 1), ("moe", 1), pytest.param(("untied", 2), marks=pytest.mark.slow)], ids=str)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, int]]:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions are sent to workers
    kind, tp = request.param
    yield save_model(tmp_path / "model", kind), tp


def test_a_plan_does_what_vllms_loaders_do(model: tuple[str, int]) -> None:
    folder, tp = model

    async def main() -> list[str]:
        engine = build(folder, tp=tp)
        try:
            return await engine.call_workers(repeat_plan, folder)
        finally:
            await engine.close()

    assert asyncio.run(main()) == [""] * tp


def loader_with_plan(model: Fused) -> Any:
    """As after a first session."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        loading = importlib.import_module("headrace.actors.engines.vllm.weight_loading")
    loader = loading.ModelLoader(model, None)
    plan = record(model, model.load, weights(0))
    assert isinstance(plan, CopyPlan)
    loader._plan, loader._targets = plan, plan.targets()
    return loader


def test_parameters_replaced_in_mid_session_are_found() -> None:
    """The plan is looked at before the session; what was copied since went to memory that no kernel reads."""
    model, sent = Fused(), weights(0)
    loader = loader_with_plan(model)
    for _ in range(2):
        loader.start(None, list(sent))
        loader.load(weights(1).items())
        loader.finish()
        assert loader.way == "in place" and torch.equal(model.norm, weights(1)["norm"])
        loader.look()
    model.norm = torch.nn.Parameter(model.norm.detach().clone())
    loader.start(None, list(sent))
    with pytest.raises(RuntimeError, match="were replaced since the last weights"):
        loader.load(weights(1).items())
    loader.abandon()


def test_a_weight_that_the_plan_does_not_know_is_checked() -> None:
    model, sent = Fused(), weights(0)
    loader = loader_with_plan(model)
    loader.start(None, list(sent))
    asked: list[str] = []

    def check(name: str, tensor: torch.Tensor) -> None:
        asked.append(name)
        raise ValueError(f"{name} is unknown")

    loader.load(sent.items(), check)
    assert not asked
    with pytest.raises(ValueError, match="nrom is unknown"):
        loader.load([("nrom", sent["norm"])], check)


def test_weights_may_be_written_where_they_belong() -> None:
    model, sent = Fused(), weights(1)
    loader = loader_with_plan(model)
    assert not loader.places, "no session is open"
    loader.start(None, list(sent))
    places = loader.places
    assert places.keys() == {"embedding", "norm"}, "of the others, a worker loads parts"
    written = {name: place.copy_(sent[name]) for name, place in places.items()}
    loader.load((sent | written).items())
    assert loader.places is places
    loader.finish()
    assert not loader.places
    expected = Fused()
    with torch.no_grad():
        expected.load(sent)
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name
