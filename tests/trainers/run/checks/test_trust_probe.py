"""The doctor compares an engine with a trainer on a model, and a run warns of log-probs that differ."""

from __future__ import annotations

import io
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.actors.engines.hf.fixed_shapes import token_logprobs
from headrace.cli import main
from headrace.cli.outcome import DONE, FAILED, MISTAKE
from headrace.tests.actors.conftest import VOCAB, save_tokenizer
from headrace.tests.actors.engines.moe import save_moe
from headrace.trainers.backends.fsdp.bitwise import engine_functions
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError
from headrace.trainers.run.checks import model_fit
from headrace.trainers.run.checks.trust_probe import (
    SOUND_IN_8_BITS,
    SOUND_IN_HALF,
    TrustReport,
    distrust,
    probe_trust,
    show_trust,
    sound_ratio,
)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_moe(tmp_path_factory.mktemp("moe"))


def shown(report: TrustReport) -> str:
    text = io.StringIO()
    show_trust(Console(file=text, width=120), "my-model", report)
    return text.getvalue()


def probe(config: Config) -> TrustReport:
    return probe_trust(config.model, config.rollout, config.trainer, config.run.seed, longest=100, replay=True)


def save_dense(folder: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Qwen3Config(vocab_size=len(VOCAB), num_key_value_heads=2, head_dim=16, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)


@pytest.mark.processes
def test_the_doctor_says_whether_log_probs_are_equal_bit_for_bit(
    tmp_path: Path, moe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fit, "_vllm_knows", lambda _: None)  # Another test asks the installed vLLM.
    save_dense(tmp_path)
    exact = ["doctor", "--model", str(tmp_path), "run.bitwise=true"]
    threads = torch.get_num_threads()
    try:
        assert main(exact) == DONE
        assert "equal bit for bit: the trainer gives each of" in capsys.readouterr().out
        assert main([*exact, "model.dtype=bfloat16", "trainer.mixed_precision=true"]) == DONE
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)

    def last_bit(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found, picked = token_logprobs(*given)
        return found.nextafter(torch.zeros(())), picked

    monkeypatch.setattr(engine_functions, "token_logprobs", last_bit)
    try:
        assert main(exact) == FAILED
    finally:
        torch.set_num_threads(threads)
    assert "not equal bit for bit: " in (printed := capsys.readouterr().out) and "expected 0 with" in printed
    assert main(["doctor", "--model", moe, "run.bitwise=true"]) == MISTAKE
    assert "run.bitwise: got true with a model of type 'qwen3_moe'" in capsys.readouterr().err


def warning(config: Config, metrics: dict[str, float], *, has_experts: bool) -> str | None:
    sides = config.model, config.rollout, config.trainer
    return distrust(*sides, config.router_replay, metrics, has_experts=has_experts)


@pytest.mark.megatron
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_replay_takes_away_what_another_number_format_does_to_routers(moe: str, backend: str) -> None:
    sections = {
        "model": {"path": moe, "dtype": "bfloat16"},
        "rollout": {"temperature": 0.8},
        "trainer": {"backend": backend, "packing": "packed"},
    }
    report = probe(build_config(sections))
    assert 16 <= report.tokens <= 64
    assert list(report.agreement) == [1, 2] and 0.5 < min(report.agreement.values()) < 1
    assert 0 < report.replayed["mismatch_mean"] < report.native["mismatch_mean"]
    assert report.native["mismatch_max"] >= report.native["mismatch_mean"]
    printed = shown(report)
    assert "without replay" in printed and "with replay" in printed and report.verdict.split(":")[0] in printed
    assert "engine hf (bfloat16)" in printed and f"trainer {backend} (float32)" in printed


@pytest.mark.processes
def test_a_model_without_experts_has_one_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The installed vLLM is asked, too, in a process of its own."""
    save_dense(tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) == DONE
    printed = capsys.readouterr().out
    assert "sound: probabilities differ by a factor of 1.0000" in printed and "with replay" not in printed
    assert find_spec("vllm") is None or "has code for Qwen3ForCausalLM" in printed
    several = {"dp": 2, "offload": True}  # The probe has one rank, which does not offload.
    given = {"model": {"path": str(tmp_path)}, "rollout": {"quantization": "int8"}, "trainer": several}
    report = probe(build_config(given))
    assert report.sound and report.most == SOUND_IN_8_BITS and 0 < report.native["mismatch_mean"] < 0.1
    assert {kind for kind in report.kinds} >= {"q_proj", "down_proj"} and "mean difference of log-probs" in shown(
        report
    )
    assert all(one.num_layers == 2 and 0 < one.weight_error < 0.02 for one in report.kinds.values())
    assert all(0 < one.mismatch_mean < 0.1 for one in report.kinds.values())
    cut = {"engine": "hf", "top_p": 0.8, "top_k": 9, "min_p": 0.01, "temperature": 0.7}
    found = probe(build_config({"model": {"path": str(tmp_path)}, "rollout": cut})).native
    assert found["mismatch_max"] < 1e-4, "the trainer takes the softmax over the sets from which tokens were drawn"


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "rollout.engine=hf"]) == MISTAKE
    assert "rollout.engine=hf: got a key without --model" in capsys.readouterr().err
    with pytest.raises(UserError, match="rollout.engine: got 'scripted' with --model"):
        probe(build_config({"model": {"path": str(tmp_path)}, "rollout": {"engine": "scripted"}}))
    with pytest.raises(UserError, match="expected a model's folder or hub id"):
        probe(build_config({"model": {"path": str(tmp_path)}}))


def report_of(native: float, replayed: float | None) -> TrustReport:
    def figures(ratio: float) -> dict[str, float]:
        return {"mismatch_mean": ratio - 1, "mismatch_kl": 0.0, "mismatch_max": ratio, "ratio_error": ratio}

    with_replay = {} if replayed is None else figures(replayed)
    return TrustReport("hf", "fsdp", 64, figures(native), with_replay, {})


def test_rounding_to_bfloat16_on_either_side_is_no_mismatch() -> None:
    def most(**sections: Any) -> list[float]:
        config = build_config(sections)
        return [sound_ratio(config.model, config.trainer, config.rollout, gpu=gpu) for gpu in (False, True)]

    assert most() == [1.02, 1.06] and most(trainer={"mixed_precision": True}) == [1.06, 1.06]
    assert most(model={"dtype": "float32"}) == [1.02, 1.02]
    assert replace(report_of(1.05, None), most=SOUND_IN_HALF).sound and not report_of(1.05, None).sound


def test_verdicts() -> None:
    assert report_of(1.001, None).sound and "on average" in report_of(1.001, None).verdict
    assert "10 times smaller" in report_of(1.01, 1.001).verdict
    assert report_of(1.05, 1.005).verdict.startswith("sound with router_replay.enabled=true only")
    assert not report_of(1.2, 1.1).sound and "a factor of 1.100" in report_of(1.2, 1.1).verdict


def test_a_run_warns_in_one_sentence() -> None:
    config, bad = Config(), {"logprob/ratio_error": 1.05, "staleness/max": 0.0}
    for silent in ({}, {"logprob/ratio_error": 1.019}, {**bad, "staleness/max": 1.0}):
        assert warning(config, silent, has_experts=True) is None
    half = build_config({"trainer": {"mixed_precision": True}})
    assert warning(half, bad, has_experts=False) is None, "rounding to bfloat16 makes up to 1.06"
    far = {**bad, "logprob/ratio_error": 1.07}
    assert "1.070 in the first step, expected at most 1.06" in str(warning(half, far, has_experts=False))
    moe_warning = warning(config, bad, has_experts=True)
    assert moe_warning and "1.050" in moe_warning and "router_replay.enabled=true" in moe_warning
    on = build_config({"router_replay": {"enabled": True}, "model": {"path": "builtin:tiny-qwen3-moe"}})
    for same, experts in ((on, True), (config, False)):
        assert "headrace doctor --model" in str(warning(same, bad, has_experts=experts))
    cut = config.model_copy(update={"rollout": config.rollout.model_copy(update={"top_p": 0.9, "mask_limit": 0})})
    assert "rollout.top_p=0.9" in str(warning(cut, bad, has_experts=False))
