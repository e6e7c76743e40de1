"""Tests of the parts of a run in one process, and of the example that makes an algorithm of them."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import headrace
from headrace import Field, Kind, MicroBatch, SamplingParams, Schema
from headrace.codecs.jagged import pack
from headrace.trainers.advantages.estimators import GrpoAdvantage, RewardRows

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_in_one_file.py"
COLUMNS = {"input_ids": torch.int32, "response_mask": torch.uint8, "rollout_logprobs": torch.float32}
SCHEMA = Schema([Field(name, Kind.PER_TOKEN, dtype) for name, dtype in COLUMNS.items()])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    made = headrace.make_tiny_model(folder, steps=2)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert headrace.make_tiny_model(folder, steps=9) == made
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "a folder that exists is left as it is"
    return made


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    return importlib.import_module(EXAMPLE.stem)


def test_the_example_uses_public_names_alone() -> None:
    tree = ast.parse(EXAMPLE.read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in imported if (node.module or "").startswith("headrace")] == ["headrace"]
    used = {alias.name for node in imported if node.module == "headrace" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), f"line {node.lineno}: {node.attr} is private"
            if isinstance(node.value, ast.Name) and node.value.id == "headrace":
                used.add(node.attr)
    assert used <= set(headrace.__all__) and len(used) > 12
    assert 200 < len(EXAMPLE.read_text().splitlines()) < 280


def test_the_example_trains_and_leaves_a_model(
    example: ModuleType, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = asyncio.run(example.train(model, 2, 0, tmp_path / "trained"))
    assert len(scores) == 2 and "step 2/2" in capsys.readouterr().out
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "trained"))
    pairs = list(zip(before.parameters(), after.parameters(), strict=True))
    assert any(not torch.equal(one, other) for one, other in pairs)


def test_the_advantages_of_the_example_are_those_of_grpo(example: ModuleType) -> None:
    rewards = np.random.default_rng(0).random(12).astype(np.float32)
    rewards[8:] = 0.3
    groups = np.repeat([5, 2, 9], 4)
    expected = GrpoAdvantage()(RewardRows(rewards, np.ones(12), groups))
    np.testing.assert_allclose(example.advantages(rewards, groups), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_example_learns(example: ModuleType, tmp_path: Path, seed: int) -> None:
    base = headrace.make_tiny_model(tmp_path / "base", seed=seed)
    scores = asyncio.run(example.train(base, 100, seed, None))
    assert scores[-1] > 0.7 and scores[-1] > scores[0] + 0.3, scores


def micro(prompt: list[int], answer: headrace.Completion) -> MicroBatch:
    """One row, with an advantage of 1."""
    length = len(prompt) + len(answer.token_ids)
    front = np.zeros(len(prompt))
    columns = {
        "input_ids": [np.append(prompt, answer.token_ids).astype(np.int32)],
        "response_mask": [np.append(front, np.ones(len(answer.token_ids))).astype(np.uint8)],
        "rollout_logprobs": [np.append(front, answer.logprobs).astype(np.float32)],
    }
    return MicroBatch(pack(SCHEMA, columns), np.array([length]), np.ones(1, np.float32), np.zeros(1, np.int64))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_an_engine_with_8_bit_weights_gives_other_log_probs_than_the_backend(model: str, kind: str) -> None:
    """The sync sends what the engine serves, and the mismatch is that of the rounding."""

    async def main() -> None:
        engine, backend = (
            headrace.make_engine(model, {"quantization": kind}),
            headrace.make_backend(model, {"lr": 0.01}),
        )
        with contextlib.closing(backend), headrace.WeightSync(backend, engine) as sync:
            for version in range(2):
                [answer] = await engine.generate("same", [5, 6, 7], SamplingParams(max_new_tokens=12))
                [logprobs] = backend.logprobs([micro([5, 6, 7], answer)], 1)
                assert 1e-5 < np.abs(logprobs[3:].numpy() - answer.logprobs).max() < 0.2
                assert (await sync.send(version + 1)).version == engine.version == version + 1
        await engine.close()

    asyncio.run(main())


def test_an_engine_samples_from_the_weights_that_a_sync_sent(model: str) -> None:
    """Log-probs of engine and backend agree before and after a step, and a sync that failed can be repeated."""

    async def main() -> None:
        engine, backend = headrace.make_engine(model, {"max_batch": 8}), headrace.make_backend(model, {"lr": 0.01})
        prompt, sampling = [5, 6, 7], SamplingParams(max_new_tokens=6)
        with contextlib.closing(backend), headrace.WeightSync(backend, engine) as sync:
            seen = []
            for version in range(3):
                [answer] = await engine.generate("same", prompt, sampling)
                row = micro(prompt, answer)
                [logprobs] = backend.logprobs([row], 1)
                np.testing.assert_allclose(logprobs[len(prompt) :], answer.logprobs, atol=1e-4)
                assert engine.version == version and set(answer.versions) == {version}
                seen.append(float(logprobs.sum()))
                backend.begin_step()
                backend.accumulate([row], 1)
                assert backend.finish_step()["train/grad_norm"] > 0
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(engine, "prepare_weights", refuses)
                    with pytest.raises(RuntimeError, match="no room"):
                        await sync.send(version + 1)
                assert engine.version == version
                assert (await sync.send(version + 1)).version == version + 1
            assert len(set(seen)) == 3
            with pytest.raises(ValueError, match="version: got 3, expected more than 3, the engine's version"):
                await sync.send(3)
        await engine.close()

    async def refuses(update: Any) -> Any:
        raise RuntimeError("no room")

    asyncio.run(main())


@pytest.mark.parametrize("bitwise", [True, False])
def test_log_probs_of_exact_parts_are_equal_bit_for_bit(model: str, bitwise: bool) -> None:
    """They are before and after a step; without the argument some differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    async def main() -> list[bool]:
        engine = headrace.make_engine(model, bitwise=bitwise)
        backend = headrace.make_backend(model, {"lr": 0.01}, bitwise=bitwise)
        equal = []
        with contextlib.closing(backend), headrace.WeightSync(backend, engine) as sync:
            for version in range(2):
                [answer] = await engine.generate("same", [5, 6, 7], SamplingParams(max_new_tokens=40))
                row = micro([5, 6, 7], answer)
                [logprobs] = backend.logprobs([row], 1)
                equal += (logprobs[3:].numpy() == answer.logprobs).tolist()
                backend.begin_step()
                backend.accumulate([row], 1)
                backend.finish_step()
                await sync.send(version + 1)
        await engine.close()
        return equal

    try:
        assert all(asyncio.run(main())) == bitwise
    finally:
        torch.set_num_threads(threads)


def test_wrong_keys_of_parts_are_refused_as_in_a_file(model: str) -> None:
    with pytest.raises(headrace.ConfigError, match="^rollout.engin: unknown key; did you mean rollout.engine"):
        headrace.make_engine(model, {"engin": "hf"})
    with pytest.raises(headrace.ConfigError, match="trainer.lr: got 'fast', expected a finite number") as refused:
        headrace.make_backend(model, {"lr": "fast"}, {"kindd": "gspo"})
    assert len(refused.value.problems) == 2
    with pytest.raises(ValueError, match="world: got 1 ranks, expected the 2 of"):
        headrace.make_backend(model, {"dp": 2})
    with pytest.raises(ValueError, match="expected a folder that exists or a hub id"):
        headrace.make_engine("./nowhere")


def test_parts_that_cannot_be_exact_are_refused_by_name(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(headrace.ConfigError, match="^rollout.quantization: got 'int8' with run.bitwise=true"):
        headrace.make_engine(model, {"quantization": "int8"}, bitwise=True)
    with pytest.raises(ValueError, match="^rollout.engine: got 'vllm' with run.bitwise=true, expected 'hf' on CPUs"):
        headrace.make_engine(model, {"engine": "vllm"}, bitwise=True)
    with pytest.raises(
        headrace.ConfigError, match="^model.dtype: got 'float32' .* expected 'bfloat16', as the trainer"
    ):
        headrace.make_backend(model, {"mixed_precision": True}, bitwise=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for make in (headrace.make_engine, headrace.make_backend):
        with pytest.raises(ValueError, match=r"^torch.get_num_threads\(\): got 2 .* call torch.set_num_threads\(1\)"):
            make(model, bitwise=True)


def test_a_sync_that_was_cancelled_can_be_repeated(model: str) -> None:
    """Ctrl-C cancels the call wherever it is; the engine keeps its weights, and no thread waits for it."""

    async def main() -> None:
        engine, backend = headrace.make_engine(model), headrace.make_backend(model)
        with contextlib.closing(backend), headrace.WeightSync(backend, engine) as sync:
            for ticks in range(6):
                task = asyncio.ensure_future(sync.send(1))
                for _ in range(ticks):
                    await asyncio.sleep(0)
                assert engine.version == 0
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (await sync.send(1)).version == engine.version == 1
        await engine.close()

    asyncio.run(main())
