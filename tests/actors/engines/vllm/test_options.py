"""Arguments that are passed through to vLLM are checked against vLLM's own, in sentences that name the key."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.engines.vllm import options

pytestmark = pytest.mark.vllm


def problems(given: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        return options.option_problems(given)


def test_what_vllm_takes_is_accepted() -> None:
    given = {
        "max_num_batched_tokens": 8192,
        "enforce_eager": True,
        "quantization": "fp8",
        "compilation_config": {"mode": 0},
        "attention_backend": "FLASH_ATTN",
        "cpu_offload_gb": 1,
        "load_format": "dummy",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }
    assert problems(given) == []
    assert {**options.arguments(given), "attention_backend": "FLASH_ATTN"} == given


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("max_num_batched_token", 5, "vLLM's engine has no such argument; did you mean max_num_batched_tokens?"),
        ("zzz", 5, "vLLM's engine has no such argument; expected an argument of vLLM's AsyncEngineArgs"),
        ("_api_process_count", 5, "vLLM's engine has no such argument"),
        ("max_num_batched_tokens", "16", "got '16', expected a number"),
        ("block_size", [16], "got [16], expected a valid integer"),
        ("enforce_eager", "yes", "got 'yes', expected true or false"),
        ("kv_cache_dtype", "fp9", "got 'fp9', expected 'auto', 'float16', 'bfloat16', 'fp8'"),
        ("attention_backend", "FLASH", "got 'FLASH', expected one of FLASH_ATTN, "),
        ("attention_config", {"nope": 3}, "got {'nope': 3}, which vLLM refuses (nope: Unexpected keyword argument)"),
        ("tensor_parallel_size", 2, "got 2, expected it unset, because rollout.tp sets it"),
        ("kv_cache_memory_bytes", 2, "got 2, expected it unset, because rollout.kv_cache sets it"),
        ("data_parallel_size", 2, "got 2, expected it unset, because rollout.num_engines sets it"),
        ("data_parallel_size_local", 2, "got 2, expected it unset, because rollout.num_engines sets it"),
        ("pipeline_parallel_size", 2, "because weights are sent to tensor-parallel processes only, see rollout.tp"),
        ("logits_processors", ["mine:Cut"], "because they would change the distribution that is sampled from"),
        ("logprobs_mode", "raw_logits", "because training needs the log-probs of the distribution"),
    ],
)
def test_each_mistake_is_one_sentence(name: str, value: Any, sentence: str) -> None:
    [problem] = problems({name: value, "enforce_eager": True} if name != "enforce_eager" else {name: value})
    assert problem.startswith(f"rollout.vllm.{name}: ") and sentence in problem


def test_every_argument_that_headrace_keeps_is_one_of_vllm_s() -> None:
    """Names of vLLM; `problems` asks for them before it asks whether vLLM has them."""
    problems({})  # imports vLLM
    library = importlib.import_module("headrace.actors.engines.vllm.library")
    known = {field.name for field in dataclasses.fields(library.AsyncEngineArgs)}
    assert {*options.OWN_KEYS, *options.OWN_VALUES} <= known


@pytest.mark.slow
@pytest.mark.processes
def test_a_child_process_tells_the_same() -> None:
    [problem] = options.problems_in_child({"block_sice": 3})
    assert problem == "rollout.vllm.block_sice: vLLM's engine has no such argument; did you mean block_size?"
    assert options.problems_in_child({"block_size": 16}) == []


@pytest.mark.processes
def test_a_child_that_fails_or_hangs_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = sys.executable
    for name, body in (
        ("fails", "import sys; sys.exit('ImportError: no vLLM')"),
        ("hangs", "import time; time.sleep(60)"),
    ):
        script = tmp_path / name
        script.write_text(f"#!{python}\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.setattr(options, "CHECK_TIMEOUT_S", 30.0 if name == "fails" else 0.5)
        [problem] = options.problems_in_child({"block_size": 16})
        assert problem.startswith("rollout.vllm: ")
        assert ("(ImportError: no vLLM)" if name == "fails" else "was not imported within") in problem
