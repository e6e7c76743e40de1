"""The examples of the documentation that train, from Python and with data of one's own, run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow  # the README's example runs in short
@pytest.mark.processes
@pytest.mark.timeout(280)
def test_the_start_pages_run_from_python(tmp_path: Path) -> None:
    blocks = (ROOT / "docs" / "start" / "first-run.md").read_text(encoding="utf-8").split("```python\n")[1:]
    [snippet] = [block.split("```")[0] for block in blocks if "run_training" in block]
    (tmp_path / "train.py").write_text(snippet)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=260)
    assert done.returncode == 0, done.stdout + done.stderr
    report = Path(done.stdout.splitlines()[-1])
    assert report == tmp_path / "runs" / "first" / "report.html" and report.exists()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_page_about_python_runs_and_goes_on_at_the_command_line(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "start" / "python.md").read_text(encoding="utf-8")
    (tmp_path / "page.py").write_text("".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    run([sys.executable, "page.py"], tmp_path)
    [commands] = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for command in commands.splitlines():
        run([sys.executable, "-m", "headrace.cli", *command.split()[1:]], tmp_path)
    assert "finished" in (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()[-1]
    assert '"name": "validation"' in (tmp_path / "eval.json").read_text()


@pytest.mark.processes
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "page", ["README.md", pytest.param("docs/start/your-data-and-reward.md", marks=pytest.mark.slow)]
)
def test_the_example_with_data_and_a_reward_of_ones_own_trains(page: str, tmp_path: Path) -> None:
    """In two steps, and from a model that has hardly been warmed up."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for title, block in re.findall(r'```\w+ title="(my[^"]+)"\n(.*?)```', text, re.DOTALL):
        (tmp_path / title).write_text(block)
    run([sys.executable, "my_data.py"], tmp_path)
    settings = ["algorithm.steps=2", "warmup.steps=10", "validation.num_prompts=8", "run.dir=mine"]
    run([sys.executable, "-m", "headrace.cli", "train", "my.yaml", *settings], tmp_path)
    last = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()[-1]
    assert "finished" in last


def run(command: list[str], folder: Path) -> None:
    """Run a command that must end well."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=260)
    assert done.returncode == 0, done.stdout + done.stderr
