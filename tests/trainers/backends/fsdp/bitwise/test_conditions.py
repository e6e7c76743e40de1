"""Tests which configurations, models and machines are refused with `run.bitwise`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.backends.fsdp.bitwise.conditions import check_family, expect_equal
from headrace.trainers.backends.fsdp.bitwise.engine_functions import compute_as_engine
from headrace.trainers.backends.train_step import WORST
from headrace.trainers.cluster.rollout_specs import fingerprint
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError

VLLM: dict[str, Any] = {"rollout": {"engine": "vllm"}, "trainer": {"mixed_precision": True}}
ON = "with run.bitwise=true, expected"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rollout": {"quantization": "int8"}}, f"rollout.quantization: got 'int8' {ON} 'none'"),
        ({"trainer": {"tp": 2}}, f"trainer.tp: got 2 {ON} 1"),
        ({"trainer": {"compile": True}}, f"trainer.compile: got true {ON} false"),
        ({"trainer": {"lora": {"rank": 4}}}, f"trainer.lora.rank: got 4 {ON} 0"),
        ({"trainer": {"mixed_precision": True}}, f"model.dtype: got 'auto' {ON} 'bfloat16', as the trainer computes"),
        ({"model": {"attention": "eager"}}, f"model.attention: got 'eager' {ON} 'auto'"),
        ({"resources": {"threads": 2}}, f"resources.threads: got 2 {ON} 1, because"),
        ({"rollout": {"top_k": 5}}, f"rollout.top_p: got 1, rollout.top_k=5, rollout.min_p=0 {ON} sampling from all"),
        (
            {"algorithm": {"mode": "async"}},
            f"algorithm.mode: got one that trains on rows of older policies {ON}",
        ),
        ({"algorithm": {"epochs": 2}}, "algorithm.prev_logprobs: got 'rollout' with run.bitwise=true and 2 updates"),
        ({"rollout": {"engine": "vllm"}}, f"trainer.mixed_precision: got false {ON} true with rollout.engine='vllm'"),
        (VLLM | {"model": {"dtype": "float32"}}, f"model.dtype: got 'float32' {ON} 'auto' or 'bfloat16'"),
        (
            VLLM | {"rollout": {"engine": "vllm", "vllm": {"enforce_eager": False}}},
            f"rollout.vllm.enforce_eager: got false {ON} it unset",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    assert only_problem({**changes, "run": {"bitwise": True}}).startswith(problem)
    assert all("run.bitwise" not in str(one) for one in problems_of({**changes, "run": {"bitwise": False}}))


def problems_of(data: dict[str, Any]) -> tuple[str, ...]:
    try:
        build_config(data)
    except UserError as error:
        return tuple(str(error).splitlines())
    return ()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"run": {"replay": "recorded"}}, f"run.replay: got 'recorded' {ON} none"),
        ({"sft": {"train": "chats.jsonl"}}, f"sft.train: got 'chats.jsonl' {ON} none"),
        ({"pool": {"address": "host:1"}}, f"pool.address: got 'host:1' {ON} none"),
        (
            {"rollout": {"endpoint": {"enabled": True, "sampling": "request"}}},
            f"rollout.endpoint.sampling: got 'request' {ON} 'run'",
        ),
    ],
)
def test_rows_that_the_policy_does_not_sample_as_the_run_says_are_refused(
    changes: dict[str, Any], problem: str
) -> None:
    run = {"bitwise": True, **changes.get("run", {})}
    assert [one for one in problems_of({**changes, "run": run}) if "bitwise" in one] == [problem]


def test_workers_on_cpus_have_one_thread() -> None:
    assert build_config({"run": {"bitwise": True}}).resources.threads == 1
    assert build_config({"run": {"bitwise": True}, "resources": {"threads": None}}).resources.threads == 1
    assert build_config({"run": {"bitwise": True}, **VLLM}).resources.threads is None
    assert build_config({}).resources.threads is None


def test_groups_of_other_runs_are_not_taken_up() -> None:
    """Their log-probs are those of an engine that computes other numbers."""
    assert fingerprint(build_config({"run": {"bitwise": True}})) != fingerprint(build_config({}))


@pytest.mark.parametrize(
    ("model", "engine", "reason"),
    [
        ({"model_type": "llama"}, "hf", "a model of type 'llama', expected a model of type 'qwen3'"),
        ({"model_type": "qwen3", "rope_parameters": {"rope_type": "yarn"}}, "hf", "rope_type is 'yarn'"),
        ({"model_type": "qwen3", "rope_scaling": {"type": "yarn"}}, "hf", "rope_type is 'yarn'"),
        ({"model_type": "qwen3", "rope_scaling": {"rope_type": "linear"}}, "hf", "rope_type is 'linear'"),
        ({"model_type": "qwen3", "attention_bias": True}, "hf", "attention_bias is true, expected false"),
        ({"model_type": "qwen3", "head_dim": 64}, "vllm", "head_dim is 64, expected 128"),
    ],
)
def test_models_that_do_not_fit_are_refused_by_name(model: dict[str, Any], engine: str, reason: str) -> None:
    with pytest.raises(ValueError, match="run.bitwise: got true with") as caught:
        check_family(SimpleNamespace(**model), engine)
    assert reason in str(caught.value)


def test_models_that_fit_pass() -> None:
    check_family(SimpleNamespace(), "vllm")  # The config of a model of the hub may not be on this machine.
    check_family(SimpleNamespace(model_type="qwen3", head_dim=128, rope_parameters={"rope_type": "default"}), "vllm")
    check_family(SimpleNamespace(model_type="qwen3", head_dim=16), "hf")


@pytest.mark.parametrize(("engine", "device", "expected"), [("vllm", "cpu", "'hf' on CPUs"), ("hf", "cuda", "'vllm'")])
def test_an_engine_for_other_devices_is_refused(engine: str, device: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.engine: got '{engine}' with run.bitwise=true, expected {expected}"):
        compute_as_engine(SimpleNamespace(), engine, torch.device(device))  # pyright: ignore[reportArgumentType]


def test_a_step_with_an_unequal_log_prob_ends_the_run() -> None:
    expect_equal(3, {"logprob/mismatch_max": 0.0, "logprob/mismatch_mean": 0.0})
    expect_equal(3, {})  # A step without a token has no mismatch.
    place = dict(zip(WORST, (1e-7, -1.5, -1.50000012, 6.0, 4.0), strict=True))
    for most, mean in ((1e-7, 1e-9), (float("nan"), float("nan")), (0.0, float("nan"))):
        figures = {"logprob/mismatch_max": most, "logprob/mismatch_mean": mean, **place}
        with pytest.raises(UserError, match=f"logprob/mismatch_max: got {most:g} in step 3 {ON} 0: ") as caught:
            expect_equal(3, figures)
        assert "trained token 4 of a row of group 6 the log-prob -1.5, the engine -1.50000012" in str(caught.value)
