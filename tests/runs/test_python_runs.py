"""Runs of `headrace.GRPO` in a script, with the script's own objects, and the how-to's notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.tests import forks
from headrace.tests.runs.cli_runs import ROOT, environment, shared_ray

SCRIPT = """
import signal, sys
import numpy as np
import headrace

folder, ray, part = sys.argv[1:]
SCALE = 1.0


def in_place(prompt, response, finish_reason):
    return SCALE * sum(a == b for a, b in zip(prompt.answer, response)) / len(prompt.answer)


def apart(prompt, response, finish_reason):
    return len(prompt.answer) * SCALE


def of_trl(completions, answer, solution, completion_ids, trainer_state, **others):
    assert answer == solution and len(completion_ids) == len(completions) and trainer_state.global_step >= 0
    return [None if said[:1] == "1" else float(said == right) for said, right in zip(completions, answer)]


class OneTurn:
    def __init__(self, tokens):
        self.tokens = tokens

    async def play(self, episode):
        said = await episode.generate(max_new_tokens=self.tokens)
        return float(len(said.text))


class LongestFirst:
    order, looks_ahead, arguments = "ready", 1000, ()

    def select(self, candidates, request):
        return np.argsort(-candidates.tokens, kind="stable")[: request.most]


def weighted(inputs, floor):
    return -max(floor, SCALE) * inputs.advantages * inputs.logprobs


class Stop(headrace.Callback):
    seen = []

    def on_step(self, event):
        self.seen.append(("step", event.step))
        return "two are enough" if event.step == 2 else None

    def on_checkpoint(self, event):
        self.seen.append(("checkpoint", event.step, event.path.is_dir()))

    def on_end(self, result):
        self.seen.append(("end", result.steps))


rows = [{"prompt": f"r{n}=", "answer": str(n)[::-1], "solution": str(n)[::-1]} for n in range(100, 160)]
rewards = [
    in_place, {"kind": apart, "runs": "process", "weight": 0.0}, headrace.rewards.from_trl(of_trl),
    {"kind": "environment", "weight": 0.01},
]
settings = {
    "run": {"dir": folder}, "warmup": {"corpus": "digit_skills", "steps": 5}, "environment": {"options": {"tokens": 6}},
    "algorithm": {"steps": 6, "prompts_per_step": 4, "group_size": 4, "mode": "streaming"},
    "rollout": {"max_new_tokens": 6}, "data": {"max_prompt_tokens": 16}, "logging": {"tensorboard": False},
    "resources": {"ray_address": ray}, "loss": {"options": {"floor": 0.5}},
}


def run(**more):
    return headrace.GRPO(
        "builtin:tiny-qwen3", rewards, iter(rows), environment=OneTurn, loss=weighted, sampler=LongestFirst,
        config=settings, **more,
    )


result = run(callbacks=[Stop()]).train()
assert result.stopped == "two are enough" and result.steps == 2 and result.model.is_dir(), result
assert Stop.seen == [("step", 1), ("step", 2), ("checkpoint", 2, True), ("end", 2)], Stop.seen
assert {"reward/in_place", "reward/apart", "reward/of_trl", "reward/environment"} <= result.metrics[-1].keys()
assert result.metrics[-1]["reward/apart"] == 3.0 and not result.metrics[-1].get("rollout/failed_rows")
SCALE = 0.5
try:
    run(resume=True).train()
except headrace.UserError as error:
    print("refused:", error)
if part == "first":
    sys.exit()
try:
    with run(resume=True, allow_changed=True) as again:
        for event in again:
            print("step", event.step, event.metrics["reward/apart"])
            signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.processes
@pytest.mark.timeout(280)
@pytest.mark.parametrize("part", ["first", pytest.param("both", marks=pytest.mark.slow)])
def test_objects_and_rows_of_a_script_are_trained_on_stopped_and_resumed(part: str, tmp_path: Path) -> None:
    """Rewards, in a process of their own and of TRL, too, environment, loss and sampler are the script's.

    A callback ends the run. It is not resumed with changed rewards, unless that is allowed; the second part is a loop,
    which is interrupted."""
    (tmp_path / "script.py").write_text(SCRIPT)
    folder, address = tmp_path / "mine", shared_ray().partition("=")[2]
    code, output = forks.run([str(tmp_path / "script.py"), str(folder), address, part], tmp_path, environment(), 240)
    assert code == 0, output
    assert "refused: apart, in_place, weighted: got another source or value" in output, output
    last = 2
    if part == "both":
        assert "step 3 1.5" in output and "interrupted: saving a checkpoint of step 3" in output, output
        assert output.splitlines()[-1] == "interrupted"
        last = 3
    assert len(list((folder / "given").iterdir())) == 1, "equal rows have one file"
    files = sorted((folder / "objects").iterdir())
    assert {path.name.partition("-")[0] for path in files} == {
        *("in_place", "apart", "of_trl", "OneTurn", "LongestFirst", "weighted")
    }
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    state = json.loads((folder / "checkpoints" / f"step_{last:06}.json").read_text())
    assert len(state["objects"]) == 6 and all(one.startswith("object@") for one in state["objects"])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_notebook_runs_twice_in_one_kernel(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert", reason="needs the extra notebook")
    notebook = json.loads((ROOT / "examples" / "notebook" / "grpo.ipynb").read_text())
    again = [{**cell, "id": f"{cell['id']}-again"} for cell in notebook["cells"]]
    notebook["cells"] += again
    (tmp_path / "twice.ipynb").write_text(json.dumps(notebook))
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--output", "done", "twice.ipynb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    outputs = [
        "".join(output.get("text", ()) or output["data"].get("text/plain", ()))
        for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"]
        for output in cell.get("outputs", ())
        if output["output_type"] != "error"
    ]
    assert sum("stopped='the loop was left'" in output for output in outputs) == 2, outputs
    assert len(os.listdir(tmp_path / "runs")) == 4
