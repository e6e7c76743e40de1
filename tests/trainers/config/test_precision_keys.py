"""Engines that compute with fewer bits: a correction is switched on and said, and keys that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.config.checks import cautions
from headrace.trainers.config.config import Config, resolved_yaml
from headrace.trainers.config.load import build_config

INT8 = {"rollout": {"quantization": "int8"}}
VLLM = {"rollout": {"quantization": "fp8", "engine": "vllm"}}


def lines(config: Config) -> list[str]:
    return cautions(config.algorithm, config.loss, config.trainer, config.rollout, window=config.overlap.window)


@pytest.mark.parametrize(
    "data", [INT8, {"rollout": {"engine": "vllm", "kv_cache_dtype": "fp8"}}, {"trainer": {"fp8": "rowwise"}}]
)
def test_a_correction_is_switched_on_and_said(data: dict[str, Any]) -> None:
    config = build_config({**data, "loss": {"clip_low": 0.1}})
    assert (config.loss.correction, config.algorithm.prev_logprobs, config.loss.clip_low) == ("tis", "recompute", 0.1)
    [line] = lines(config)
    assert "give tokens other probabilities than the trainer, which loss.correction=tis corrects" in line
    assert build_config(yaml.safe_load(resolved_yaml(build_config(data)))).loss.correction == "tis"


def test_a_choice_of_the_user_stays() -> None:
    for chosen in ({"loss": {"correction": "none"}}, {"algorithm": {"prev_logprobs": "rollout"}}):
        config = build_config({**INT8, **chosen})
        assert (config.loss.correction, config.algorithm.prev_logprobs) == ("none", "rollout")
        assert "which loss.correction=none does not correct; loss.correction=tis does" in lines(config)[0]
    assert build_config({}).loss.correction == "none" and not lines(build_config({}))


def test_a_supervised_run_has_no_engines_to_correct_for(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    config = build_config({"sft": {"train": str(tmp_path / "rows.jsonl")}, "trainer": {"fp8": "rowwise"}})
    assert config.loss.kind == "sft" and lines(config) == []


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"rollout": {"quantization": "int4"}}, "rollout.quantization: got 'int4', expected one of none, fp8,"),
        ({**INT8, "sync": {"transport": "pairs"}, "trainer": {"tp": 2}},
         "sync.transport: got 'pairs' with rollout.quantization=int8 with trainer.tp=2, expected another one"),
        ({"rollout": {"quantization": "fp8_block"}, "sync": {"transport": "pairs"}},
         "sync.transport: got 'pairs' with rollout.quantization=fp8_block, expected another one"),
        ({"rollout": {**VLLM["rollout"], "vllm": {"quantization": "awq"}}},
         "rollout.vllm.quantization: got 'awq' with rollout.quantization='fp8', expected it unset"),
        ({"rollout": {"engine": "vllm", "kv_cache_dtype": "fp8", "vllm": {"kv_cache_dtype": "fp8_e5m2"}}},
         "rollout.vllm.kv_cache_dtype: got 'fp8_e5m2' with rollout.kv_cache_dtype='fp8', expected it unset"),
        ({"rollout": {"engine": "vllm", "kv_cache_dtype": "fp8_e5m2"}},
         "rollout.kv_cache_dtype: got 'fp8_e5m2', expected one of auto, fp8"),
        ({"rollout": {"kv_cache_dtype": "fp8"}}, "rollout.kv_cache_dtype: got 'fp8' with rollout.engine='hf'"),
        ({"trainer": {"fp8": "e4m3"}}, "trainer.fp8: got 'e4m3', expected one of none, tensorwise, rowwise,"),
        ({"trainer": {"fp8": "rowwise", "backend": "megatron"}},
         "trainer.fp8: got 'rowwise' with trainer.backend='megatron', expected 'none'"),
        ({"trainer": {"fp8": "rowwise", "lora": {"rank": 4}}},
         "trainer.fp8: got 'rowwise' with trainer.lora.rank=4, expected 'none', because torchao would"),
        ({"trainer": {"fp8": "rowwise"}, "run": {"bitwise": True}},
         "trainer.fp8: got 'rowwise' with run.bitwise=true, expected 'none'"),
        ({"rollout": {"engine": "scripted", "quantization": "fp8"}, "trainer": {"backend": "fsdp"}},
         "rollout.quantization: got 'fp8' with rollout.engine='scripted', expected 'none'"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_one_sentence(data: dict[str, Any], sentence: str) -> None:
    assert sentence in only_problem(data)
