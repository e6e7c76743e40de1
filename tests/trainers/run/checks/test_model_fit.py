"""The doctor says from a model's config alone what the model can be used with, and what memory it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.actors.process.memory import AssumedMachine, assume_machine
from headrace.cli import main
from headrace.cli.outcome import DONE, FAILED, MISTAKE
from headrace.tests.actors.conftest import VOCAB, save_tokenizer
from headrace.trainers.config.load import build_config
from headrace.trainers.run.checks import model_fit
from headrace.trainers.run.checks.doctor import Finding, State
from headrace.trainers.run.checks.model_fit import ModelFit, examine_model
from headrace.trainers.run.checks.trust_probe import CPU_WORK, longest_row

SIZES = {
    "vocab_size": len(VOCAB), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


def save_config(folder: Path, kind: str, **keys: Any) -> str:
    AutoConfig.for_model(kind, **{**SIZES, **keys}).save_pretrained(folder)
    return str(folder)


def examine(path: str, **sections: Any) -> tuple[ModelFit, dict[str, Finding]]:
    """Return what is found, and the findings by `area name`."""
    fit = examine_model(build_config({"model": {"path": path}, **sections}))
    return fit, {f"{finding.area} {finding.name}": finding for finding in fit.findings}


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_fit, "_vllm_knows", lambda named: None)


def test_a_dense_model(tmp_path: Path) -> None:
    fit, found = examine(save_config(tmp_path, "qwen2"))
    weights = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).num_parameters()
    assert fit.fits and not fit.replay and fit.parameters == weights
    assert found["model parameters"].detail == f"{weights:,}"
    assert [found[f"fsdp trainer.{key}"].detail for key in ("tp", "cp")] == ["2, 4", "2, 4, 8, 16"]
    assert [found[f"megatron trainer.{key}"].detail for key in ("tp", "pp")] == ["2, 4", "2"]
    assert found["model LoRA targets"].detail == "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert "fsdp trainer.ep" not in found and "fsdp router replay" not in found
    assert found["memory GPU"].state is State.NOTE and "--machine" in found["memory GPU"].detail


def test_a_model_with_experts(tmp_path: Path) -> None:
    fit, found = examine(save_config(tmp_path, "qwen3_moe", **EXPERTS))
    stacked = SIZES["num_hidden_layers"] * 6 * 3 * 16 * 32
    assert f"{stacked:,} of them in stacked experts; 2 of 6 experts in 2 layers" in found["model parameters"].detail
    assert found["fsdp trainer.ep"].detail == found["megatron trainer.ep"].detail == "2"
    assert fit.replay and found["fsdp router replay"].detail == "2 x 2 expert ids per token"
    assert "stacked: experts.down_proj, experts.gate_up_proj" in found["model LoRA targets"].detail


@pytest.mark.parametrize(
    ("kind", "keys", "name", "sentence"),
    [
        ("gpt2", {}, "fsdp trainer.tp", "transformers declares no tensor-parallel plan"),
        ("gpt2", {}, "megatron trains", "of type 'gpt2', expected one of llama"),
        ("gemma2", {"head_dim": 8}, "fsdp trainer.cp", "its attention has a soft cap"),
        ("mamba2", {"num_heads": 8, "head_dim": 8}, "engine hf", "has no argument position_ids"),
        ("qwen3", {"hidden_act": "gelu", "head_dim": 8}, "megatron trains", "with hidden_act = gelu, expected silu"),
    ],
)
def test_a_no_is_the_sentence_of_the_run(
    tmp_path: Path, kind: str, keys: dict[str, Any], name: str, sentence: str
) -> None:
    _, found = examine(save_config(tmp_path, kind, **keys))
    assert found[name].state is State.NOTE and sentence in found[name].detail


def test_memory_of_a_machine(tmp_path: Path) -> None:
    """A model of 7 billion parameters trains on two GPUs of 80 GiB if passes are computed again, and on none of 8."""
    keys = {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "vocab_size": 152064,
    }  # fmt: skip
    path = save_config(tmp_path, "qwen2", **keys)
    for machine, state, what in (
        (
            AssumedMachine(1, 8, 80 << 30),
            State.OK,
            "on each of 2 GPUs of 80.0 GiB (trainer.dp=2, trainer.recompute=full)",
        ),
        (AssumedMachine(1, 8, 8 << 30), State.FIX, "on each of 8 GPUs of 8.0 GiB"),
    ):
        with assume_machine(machine):
            _, found = examine(path, trainer={"mixed_precision": True})
        worker = found["memory train worker"]
        assert worker.state is state and what in worker.detail
        assert ("too much: needs more GPUs" in worker.detail) == (state is State.FIX)
        assert "weights 14.2" in found["memory engine"].detail or state is State.FIX


def test_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without weights it compares nothing, and says so. With weights a row is longer than the model's window."""
    path = save_config(tmp_path, "mistral", sliding_window=40, head_dim=8)
    assert main(["doctor", "--model", path, "--machine", "1x2x80"]) == DONE
    printed = capsys.readouterr().out
    assert "trainer.dp=1" in printed and "because --machine plans for another machine" in printed
    assert main(["doctor", "--model", path]) == DONE
    assert f"because {path} has no weights" in capsys.readouterr().out
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)
    save_tokenizer(tmp_path)
    assert main(["doctor", "--model", path]) == DONE
    printed = capsys.readouterr().out
    assert "sound: probabilities differ by a factor of 1.0000" in printed and "in rows of up to 57 tokens" in printed


@pytest.mark.parametrize(
    ("keys", "overrides", "sentence"),
    [
        ({}, {"tp": 3}, "trainer.tp: got 3, expected a divisor of the model's num_attention_heads = 4"),
        ({"hidden_size": "32"}, {}, "expected a folder or hub id of a model that transformers can build"),
        ({"hidden_act": "silly"}, {}, "KeyError: 'silly'"),
        ({"model_type": "bert"}, {"tp": 2}, "got a model of type 'bert' with is_decoder = false"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    tmp_path: Path, keys: dict[str, Any], overrides: dict[str, int], sentence: str
) -> None:
    path = save_config(tmp_path, "qwen3", head_dim=8)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        examine(path, trainer=overrides)


def test_a_file_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_config(tmp_path / "model", "qwen3", head_dim=8)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--model: got the file 'model/config.json', expected the folder of the model"):
        examine("model/config.json")


def test_models_that_do_not_train_are_told(tmp_path: Path) -> None:
    """A model whose tokens see later ones, quantized weights, and a mesh that is larger than the machine."""
    fit, found = examine(save_config(tmp_path / "bert", "bert"))
    assert not fit.fits and "is_decoder = false" in found["fsdp trains"].detail
    path = save_config(tmp_path / "quantized", "qwen2", quantization_config={"quant_method": "fp8"})
    fit, found = examine(path)
    assert not fit.fits and "weights quantized by 'fp8'" in found["fsdp trains"].detail
    with assume_machine(AssumedMachine(1, 8, 80 << 30)):
        _, found = examine(save_config(tmp_path, "qwen2"), trainer={"cp": 16, "packing": "packed"})
    assert found["memory train worker"].state is State.FIX
    assert found["memory train worker"].detail.startswith("16 GPUs are needed for one replica")


def test_the_exit_code_says_that_a_model_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", save_config(tmp_path, "mamba2", num_heads=8, head_dim=8)]) == FAILED
    assert main(["doctor", "--model", str(tmp_path / "none")]) == MISTAKE
    assert main(["doctor", "--machine", "1x8x80"]) == MISTAKE
    assert "--machine: got a machine without --model" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert main(["doctor", "--model", str(tmp_path)]) == MISTAKE


def test_a_cpu_compares_short_rows_of_large_models() -> None:
    assert longest_row(int(CPU_WORK)) == 1
    assert longest_row(10**6) > 10_000
