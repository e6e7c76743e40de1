"""`headrace sft` on a file, then `headrace train`; validation, resume after kill -9, and a warm-up on a file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.cli.command import main
from headrace.tests import forks
from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.test_journal_resume import kill_all

pytestmark = pytest.mark.processes
SHORT = ("model.path=builtin:tiny-qwen3", "logging.tensorboard=false", "resources.threads=1", "run.checkpoint_every=5")


def write_texts(folder: Path) -> None:
    rng = random.Random(1)
    digits = ["".join(rng.choices("0123456789", k=rng.randint(3, 8))) for _ in range(230)]
    lines = [json.dumps({"prompt": f"z{text}=", "completion": text[::-1]}) + "\n" for text in digits]
    (folder / "train.jsonl").write_text("".join(lines[30:]))
    (folder / "held_out.jsonl").write_text("".join(lines[:30]))
    sections: dict[str, Any] = {
        "sft": {"train": "train.jsonl", "validation": "held_out.jsonl", "max_tokens": 24},
        "algorithm": {"steps": 12, "prompts_per_step": 16},
        "trainer": {"lr": 0.01},
        "validation": {"every": 6},
    }
    (folder / "sft.yaml").write_text(json.dumps(sections))


def sft(folder: Path, name: str, *overrides: str) -> str:
    """The output of `headrace sft`, which joins this process's Ray."""
    arguments = ["headrace.cli", "sft", "sft.yaml", f"run.dir={folder / name}", *SHORT, runs.shared_ray(), *overrides]
    code, output = forks.run(arguments, folder, runs.environment(), 240)
    assert code == 0, output
    return output


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "model.safetensors")


def loss_by_hand(model: Path, texts: Path) -> tuple[float, int]:
    """The mean of -log p over the completions and their ends, and the number of tokens, with transformers alone."""
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    total, count = 0.0, 0
    for line in map(json.loads, texts.read_text().splitlines()):
        prompt = tokenizer(line["prompt"])["input_ids"]
        ids = torch.tensor([[*prompt, *tokenizer(line["completion"])["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = policy(ids).logits[0, len(prompt) - 1 : -1].double()
        total += torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum").item()
        count += len(logits)
    return total / count, count


def test_sft_and_then_train(tmp_path: Path) -> None:
    write_texts(tmp_path)
    output = sft(tmp_path, "sft")
    steps = {line["step"]: line for line in runs.metrics(tmp_path / "sft") if "event" not in line}
    assert list(steps) == list(range(13))
    validated = [step for step, line in steps.items() if "validation/loss" in line]
    assert validated == [0, 6, 12] and "held-out loss" in output
    losses = [steps[step]["validation/loss"] for step in validated]
    assert losses[0] > losses[1] > losses[2] and steps[12]["sft/loss"] < steps[1]["sft/loss"] - 0.5
    assert losses[2] == pytest.approx(
        loss_by_hand(tmp_path / "sft" / "model", tmp_path / "held_out.jsonl")[0], abs=1e-5
    )
    assert steps[12]["validation/tokens"] == loss_by_hand(tmp_path / "sft" / "model", tmp_path / "held_out.jsonl")[1]
    assert steps[3]["sft/tokens"] == steps[3]["train/tokens"] > 16 * 4
    assert not [key for key in steps[3] if key.startswith(("reward/", "rollout/", "staleness/", "sync/", "logprob/"))]
    options = ("algorithm.steps=1", "validation.every=0", "warmup.corpus=none", f"model.path={tmp_path}/sft/model")
    [trained] = runs.trained(tmp_path / "train", *options)
    assert trained["train/skipped"] == 0 and trained["rollout/failed_rows"] == 0


def test_each_command_names_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "sft.yaml"]) == 2
    assert "sft.train: got a file with `headrace train`, expected it with `headrace sft`" in capsys.readouterr().err
    assert main(["sft", "sft.yaml", "sft.train=[]"]) == 2
    assert "sft.train: not set, expected a file of conversations" in capsys.readouterr().err
    (tmp_path / "train.jsonl").write_text('{"prompt": "z1=", "completion": "1"}\n{"prompt": "z2="}\n')
    assert main(["sft", "sft.yaml", *SHORT, "--dry-run"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "sft.train: line 2 of 'train.jsonl': got the columns prompt, expected" in told


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [(), ("algorithm.mode=async",), ("trainer.lora.rank=4", "trainer.dp=2")])
def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path, options: tuple[str, ...]) -> None:
    write_texts(tmp_path)
    sft(tmp_path, "whole", *options)
    arguments = ["headrace.cli", "sft", "sft.yaml", f"run.dir={tmp_path}/killed", *SHORT, *options]
    process = runs.start_command([*arguments, "algorithm.steps=100000"], tmp_path)
    runs.wait_for_step(tmp_path / "killed", 7, process)
    kill_all(process, tmp_path / "killed")
    code, output = forks.run(
        ["headrace.cli", "sft", str(tmp_path / "killed" / "config.yaml"), "--resume", "algorithm.steps=12"],
        tmp_path, runs.environment(), 240,
    )  # fmt: skip
    assert code == 0, output
    [resumed] = [line for line in runs.metrics(tmp_path / "killed") if line.get("event") == "resumed"]
    assert 5 <= resumed["step"] < 12
    whole, killed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert whole.keys() == killed.keys() and all(torch.equal(whole[name], killed[name]) for name in whole)


@pytest.mark.slow
def test_a_run_warms_up_on_a_file(tmp_path: Path) -> None:
    write_texts(tmp_path)
    options = (
        f"warmup.corpus={tmp_path}/train.jsonl", "warmup.batch_size=16", "sft.max_tokens=24", "algorithm.steps=1",
        "validation.every=0",
    )  # fmt: skip
    [step] = runs.trained(tmp_path / "run", *options)
    warmup = [line for line in runs.metrics(tmp_path / "run" / "warmup") if "sft/loss" in line]
    assert len(warmup) == 10 and warmup[-1]["sft/loss"] < warmup[0]["sft/loss"] - 0.5
    assert step["logprob/mismatch_max"] < 1e-3  # the engines and the train workers have the warmed-up weights
    runs.finish(tmp_path / "run", *options[:-2], "validation.every=0", "algorithm.steps=2", "--resume")
    assert len([line for line in runs.metrics(tmp_path / "run" / "warmup") if "sft/loss" in line]) == 10
