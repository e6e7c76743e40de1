"""`headrace bench gpu`: the summary's names, what is refused, and the whole command on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.bench import records
from headrace.bench.gpu import trl, whole_runs
from headrace.bench.gpu.nvml import GpuSamples
from headrace.bench.gpu.train_run import TrainOutcome, TrainTask, read_outcome, run_train
from headrace.bench.gpu.trl import TrlOutcome, TrlTask, best, run_trl
from headrace.bench.gpu.whole_runs import GpuOptions, chosen_layouts, summarise
from headrace.bench.gpu.works import EXACT, EXAMPLES, GRPO_WORKS, Layout, parse_layout
from headrace.cli import main
from headrace.tests.bench.gpu.runs import record, task, write_run
from headrace.trainers.config.load import load_config
from headrace.trainers.errors import UserError

Keep = Callable[[TrainOutcome], None]
LONE, PAIR = parse_layout("colocated-1", 2), parse_layout("separate-2", 2)


def outcome(folder: Path, layout: Layout, seconds: float, samples: GpuSamples | None = None) -> TrainOutcome:
    """The outcome of a run of three steps, the last two of `seconds` each."""
    one = task(folder, layout)
    ends = [10.0, 10 + seconds, 10 + 2 * seconds]
    write_run(one.folder, [record(number, end, seconds) for number, end in enumerate(ends, 1)])
    return read_outcome(one, time.time() - 15, samples or GpuSamples([]))


def test_the_summary_has_the_names_that_others_rely_on(tmp_path: Path) -> None:
    at = [time.time() - 15 + number for number in (5.0, 11.0, 13.0, 30.0)]
    samples = GpuSamples(["a", "b"], at, [[0.0, 0.0], [1.0, 0.0], [0.5, 0.0], [0.0, 0.0]], [[1.0, 2.0]] * 4)
    first, other = outcome(tmp_path, LONE, 2.0, samples), outcome(tmp_path, PAIR, 3.0)
    runs_of_trl = [TrlOutcome((9.0, 4.0, 4.4, 4.0), (0.4,) * 4, 30.0, ""), TrlOutcome((), (), 0.0, "trl: failed")]
    summary = summarise("grpo-0.6b", [first, other, outcome(tmp_path, LONE, 2.2)], runs_of_trl)
    assert summary["gpu.grpo-0.6b.colocated-1.step_s"] == pytest.approx(2.1)
    assert summary["gpu.grpo-0.6b.separate-2.step_s"] == pytest.approx(3.0)
    assert summary["gpu.grpo-0.6b.colocated-1.rollout_tokens_per_s"] == 2500, "the first step is not counted"
    assert summary["gpu.grpo-0.6b.colocated-1.train_tokens_per_s"] == 5000
    assert summary["gpu.grpo-0.6b.colocated-1.samples_per_s"] == pytest.approx(16 / 2.1, rel=0.01)
    assert summary["gpu.grpo-0.6b.colocated-1.idle_share.0"] == pytest.approx(0.25)
    assert summary["gpu.grpo-0.6b.colocated-1.idle_share.1"] == 1.0
    assert "gpu.grpo-0.6b.separate-2.idle_share.0" not in summary, "it was not sampled"
    assert "gpu.grpo-0.6b.colocated-1.mfu" not in summary, "the device's peak is not known"
    assert summary["gpu.grpo-0.6b.vs_trl"] == pytest.approx(2.1 / 4.0)
    assert summary["gpu.grpo-0.6b.separate-2.plane_share"] == pytest.approx(0.04)
    shares = [value for name, value in summary.items() if name.startswith("gpu.grpo-0.6b.separate-2.share.")]
    assert len(shares) == 9 and sum(shares) == pytest.approx(1.0)


def test_idle_time_is_that_of_the_counted_steps_and_the_start_that_before_the_first(tmp_path: Path) -> None:
    found = outcome(tmp_path, LONE, 2.0)
    # The metrics' clock starts 15 s before the end, and so did the process; the first step began 8 s later.
    assert found.start_s == pytest.approx(8.0, abs=0.5) and found.idle_shares == [] == found.peaks_gib
    assert [step.step for step in found.figures] == [1, 2, 3]


def test_the_faster_run_of_trl_counts() -> None:
    slow, fast = TrlOutcome((1.0, 4.0), (), 0.0, ""), TrlOutcome((9.0, 3.0), (), 0.0, "")
    assert best([slow, fast]) is fast and best([TrlOutcome((1.0,), (), 0.0, "")]) is None


@pytest.mark.parametrize(
    ("work", "backend"),
    [(work, backend) for work, of in GRPO_WORKS.items() for backend in ("fsdp", "megatron")[: 1 if of.picture else 2]],
)
def test_what_a_work_runs_is_a_configuration(tmp_path: Path, work: str, backend: str) -> None:
    """Without a layout, whose keys the placement of the run's processes reads."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "some words"}\n')
    one = TrainTask(GRPO_WORKS[work], Layout("cpu", "cpu", 0), backend, tmp_path, tmp_path / "run", 3, 32, 10.0)
    config = load_config(one.arguments()[1], one.arguments()[2:])
    assert config.rollout.max_new_tokens == GRPO_WORKS[work].max_new_tokens and not config.validation.every
    assert config.trainer.backend == backend and config.reward.functions[0].label == "spread"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("gpu-*.yaml")), ids=lambda path: path.name)
def test_an_example_runs_as_it_stands(path: Path) -> None:
    config = load_config(path)
    assert config.rollout.engine == "vllm" and config.model.dtype == "bfloat16" and config.trainer.mixed_precision


def test_a_machine_without_a_gpu_runs_the_tiny_work_alone(tmp_path: Path) -> None:
    assert [one.label for one in chosen_layouts(GpuOptions(tmp_path, "grpo-tiny"), 0)] == ["cpu"]
    with pytest.raises(
        UserError, match="--work: got 'grpo-4b' on a machine without a GPU, expected grpo-tiny or grpo-tiny-moe"
    ):
        chosen_layouts(GpuOptions(tmp_path, "grpo-4b"), 0)
    with pytest.raises(UserError, match="--layout: got 'separate' on a machine without a GPU"):
        chosen_layouts(GpuOptions(tmp_path, "grpo-tiny", layouts=("separate",)), 0)


def test_trl_is_compared_with_one_gpu(tmp_path: Path) -> None:
    options = GpuOptions(tmp_path, "grpo-0.6b", baseline="trl")
    assert [one.label for one in chosen_layouts(options, 1)] == ["colocated"]
    with pytest.raises(UserError, match="TRL runs on one GPU, which no layout of colocated does"):
        chosen_layouts(options, 2)
    with pytest.raises(UserError, match="--baseline: got 'trl' with grpo-vl-3b, expected none, because TRL's run here"):
        chosen_layouts(GpuOptions(tmp_path, "grpo-vl-3b", baseline="trl"), 1)


def test_mistakes_are_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["bench", "gpu", "--out", str(tmp_path / "out")]
    assert main([*start, "--work", "grpo-7b"]) == 2
    assert (
        "--work: got 'grpo-7b', expected some of grpo-tiny, grpo-tiny-moe, grpo-tiny-vl, grpo-0.6b"
        in capsys.readouterr().err
    )
    assert main([*start, "--work", "grpo-tiny", "--steps", "1"]) == 2
    assert "--steps: got 1, expected at least 2" in capsys.readouterr().err
    assert main([*start, "--work", "grpo-tiny", "--baseline", "trl"]) == 2
    assert "trl==1.16.0" in capsys.readouterr().err
    assert main([*start, "--work", "grpo-tiny", "trainer.rl=1"]) == 2
    assert "trainer.rl" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    assert main(["bench", "gpu", "--out", str(tmp_path), "--work", "grpo-tiny"]) == 2
    assert "is not empty, expected a new folder" in capsys.readouterr().err


def test_figures_are_written_after_each_run_and_wrong_ones_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of two runs has a wrong gradient; the command fails, and the figures of both are there."""
    seen = []

    def fake_run(one: TrainTask, bounds: object, sampler: object, tell: object, keep: Keep) -> None:
        seen.append((tmp_path / "out" / "summary.json").exists())
        write_run(one.folder, [record(number, 2.0 * number, 1.0) for number in (1, 2, 3)])
        found = read_outcome(one, time.time(), GpuSamples([]))
        found.complaints += ["cpu: step 2: gradient norm 99"] * (len(seen) - 1)
        keep(found)

    monkeypatch.setattr(whole_runs, "run_train", fake_run)
    monkeypatch.setattr(whole_runs, "make_folder", lambda *_: None)
    monkeypatch.setattr(records, "_commit", lambda: "unknown")
    out = tmp_path / "out"
    arguments = ["bench", "gpu", "--work", "grpo-tiny", "--repeat", "2", "--out", str(out), "trainer.lr=1e-5"]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "failed: cpu: step 2: gradient norm 99" in printed and "fsdp, 3 steps of 16 samples of up to 32" in printed
    assert seen == [False, True]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [len(line["steps"]) for line in lines] == [3, 3] and lines[0]["steps"][0]["mfu"] is None
    summary = json.loads((out / "summary.json").read_text())
    assert summary["gpu.grpo-tiny.cpu.step_s"] == 1.0
    assert summary["conditions"]["overrides"] == ["trainer.lr=1e-5"]
    assert summary["conditions"]["complaints"] == ["cpu: step 2: gradient norm 99"]
    assert "## cpu.2" in (out / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("work", "keys"),
    [
        ("grpo-tiny", ()),
        pytest.param("grpo-tiny-vl", ("rollout.engine=vllm", "rollout.kv_cache=64"), marks=pytest.mark.vllm),
    ],
)
def test_the_whole_command_on_a_cpu(tmp_path: Path, work: str, keys: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "headrace.cli", "bench", "gpu", "--work", work, "--out", str(out), *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env={**os.environ, "COLUMNS": "300"})
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    name = f"gpu.{work}.cpu"
    assert summary[f"{name}.step_s"] > 0 and summary[f"{name}.mismatch_max"] < EXACT.mismatch_max
    assert 0 < summary[f"{name}.grad_norm"] < EXACT.grad_norm
    shares = [value for key, value in summary.items() if key.startswith(f"{name}.share.")]
    assert sum(shares) == pytest.approx(1.0)
    assert not any("idle_share" in key or "mfu" in key for key in summary), "there is no GPU"
    assert "| 3 |" in (out / "report.md").read_text() and (out / "cpu" / "report.html").exists()
    assert not (out / "model").exists() and not (out / "cpu" / "model").exists()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("limit_s", "expected"),
    [(0.0, "the run was ended after its limit of 0 s"), (200.0, "the run ended with exit code 2")],
)
def test_a_run_that_takes_too_long_or_fails_is_told_of(tmp_path: Path, limit_s: float, expected: str) -> None:
    """There is no model: a run that is given the time says so, and exits with 2."""
    one = task(tmp_path, Layout("cpu", "cpu", 0), limit_s=limit_s)
    kept: list[TrainOutcome] = []
    run_train(one, EXACT, None, lambda _: None, kept.append)
    [found] = kept
    assert found.figures == [] and found.complaints == [
        f"cpu: {expected}; its output is in {one.folder}.txt",
        "cpu: 0 steps were finished, expected at least 2",
    ]


FAKE_TRL = """
import json
from dataclasses import make_dataclass

class GRPOConfig:
    def __init__(self, **options): self.options = options

class GRPOTrainer:
    def __init__(self, model, reward_funcs, args, train_dataset, callbacks):
        assert reward_funcs(["p"], ["\\x01"]) == [0.1] and len(train_dataset) == 2
        self.options, self.callbacks = args.options, callbacks
    def train(self):
        for step in range(self.options["max_steps"]):
            for callback in self.callbacks:
                callback.on_step_begin(None, None, None)
                callback.on_step_end(None, None, None)
                callback.on_log(None, None, None, logs={"grad_norm": 0.4 + step, "note": "text"})
        if self.options["learning_rate"] != 1e-6 or self.options["gradient_accumulation_steps"] != 2:
            raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_trl_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in TRL's place makes steps and logs as TRL does; a process that fails is reported."""
    site, model = tmp_path / "site", tmp_path / "model"
    site.mkdir()
    model.mkdir()
    (site / "trl.py").write_text(FAKE_TRL)
    (model / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
    settings = TrlTask(str(model), 3, 4, 4, 48, 32, micro=8, memory=0.4, recompute=False, vllm=False)
    kept: list[TrlOutcome] = []
    run_trl(settings, tmp_path / "trl.1", 200, lambda _: None, kept.append)
    [found] = kept
    assert not found.problem and len(found.seconds) == 3 and found.grad_norms == (0.4, 1.4, 2.4)
    wrong = TrlTask(str(model), 3, 4, 4, 48, 32, micro=16, memory=0.4, recompute=False, vllm=False)
    run_trl(wrong, tmp_path / "trl.2", 200, lambda _: None, kept.append)
    failed = kept[-1]
    assert len(failed.seconds) == 3, "a process that fails leaves the steps that it made"
    assert failed.problem == f"trl: ended with exit code 3; its output is in {tmp_path / 'trl.2.txt'}"


def test_trl_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="--baseline: got 'trl', which is not installed: pip install trl"):
        trl.check_trl()
