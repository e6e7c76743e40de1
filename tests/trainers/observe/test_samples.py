"""Tests how samples.jsonl is joined, selected, printed, and shown in the report, where no text becomes HTML."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.trainers.errors import UserError
from headrace.trainers.observe.pages.report import write_report
from headrace.trainers.observe.samples import Choice, mismatch, read_samples, select, show_samples

HOSTILE = "</script><script>alert(1)</script><!-- $title \u2028 {0} <img src=x onerror=alert(2)>"


def episode(key: str, *, reward: float | None = 1.0, text: str = "words", version: int = 0, **more: Any) -> dict:
    return {
        "kind": "episode", "set": "train", "key": key, "prompt": f"prompt of {key}", "answer": "42",
        "turns": [{"role": "policy", "text": text, "lengths": [len(text)], "logprobs": [-0.5]}], "tokens_left_out": 0,
        "rewards": {"exact_match": 1.0, "format": 0.5}, "reward": reward, "error": "", "finish_reason": "stop",
        "version": version, "versions": [version, version], "response_tokens": 1, "time": 0.0,
    } | more  # fmt: skip


def trained(key: str, step: int, logprob: float = -0.75) -> dict:
    return {"kind": "trained", "key": key, "step": step, "advantage": 1.5, "logprobs": [logprob]}


def run_with(folder: Path, *lines: dict, torn: str = "") -> Path:
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    return folder


def test_both_lines_of_a_row_are_joined(tmp_path: Path) -> None:
    run_with(tmp_path, episode("0.0"), episode("0.1"), trained("0.0", 3), torn='{"kind": "epi')
    first, second = read_samples(tmp_path / "samples.jsonl")
    assert (first["step"], first["advantage"], first["trained_logprobs"]) == (3, 1.5, [-0.75])
    assert (second["step"], second["advantage"], second["trained_logprobs"]) == (None, None, None)
    assert mismatch(first) == pytest.approx(0.25) and mismatch(second) is None
    assert read_samples(tmp_path / "missing.jsonl") == []
    assert read_samples(tmp_path / "samples.jsonl" / "samples.jsonl") == [], "a file is no run folder"


def test_a_row_that_was_generated_again_replaces_the_first(tmp_path: Path) -> None:
    run_with(tmp_path, episode("0.0", text="old"), trained("0.0", 1), episode("0.0", text="new"), trained("0.0", 2))
    [row] = read_samples(tmp_path / "samples.jsonl")
    assert row["turns"][0]["text"] == "new" and row["step"] == 2


def test_a_held_out_prompt_has_a_row_for_each_version(tmp_path: Path) -> None:
    run_with(tmp_path, *(episode("val-0.0", version=version, set="validation") for version in (0, 10, 20)))
    assert [row["step"] for row in read_samples(tmp_path / "samples.jsonl")] == [0, 10, 20]


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "episode", "set": "train", "key": "a"}',
        '{"kind": "episode"}',
        '{"kind": "other", "set": "train", "key": "0.0"}',
    ],
)
def test_other_lines_are_refused_by_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps(episode("0.0")) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="line 2: this is not a line of samples"):
        read_samples(tmp_path / "samples.jsonl")


def test_selections(tmp_path: Path) -> None:
    run_with(
        tmp_path, episode("0.0", reward=0.2), episode("0.1", reward=0.9),
        episode("0.2", reward=None, error="reward 'x' raised"),
        episode("1.0", reward=0.5, finish_reason="length", text="Needle in it"), trained("0.0", 1, -0.6),
        trained("0.1", 1, -2.5), episode("val-0.0", set="validation"),
    )  # fmt: skip
    rows = read_samples(tmp_path / "samples.jsonl")

    def keys(**choice: Any) -> list[str]:
        return [row["key"] for row in select(rows, Choice(**choice))]

    assert keys(show="best", name="train") == ["0.1", "1.0", "0.0"]
    assert keys(show="worst", limit=1) == ["0.0"]
    assert keys(show="truncated") == ["1.0"] and keys(show="failed") == ["0.2"]
    assert keys(show="mismatch") == ["0.1", "0.0"]
    assert keys(show="untrained") == ["1.0", "0.2"]
    assert keys(search="needle") == ["1.0"] and keys(search="prompt of val") == ["val-0.0"]
    assert keys(step=1) == ["0.1", "0.0"] and keys(limit=2) == ["val-0.0", "1.0"]


def test_episodes_are_printed_as_they_are(tmp_path: Path) -> None:
    run_with(tmp_path, episode("0.0", text="[bold]not markup[/bold]"), trained("0.0", 3))
    console = Console(file=io.StringIO(), width=80)
    assert show_samples(tmp_path, Choice(), console) == 1
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "policy> [bold]not markup[/bold]" in text and "prompt> prompt of 0.0" in text and "expected> 42" in text
    text = text.replace("\n", "")
    assert "step 3" in text and "advantage +1.5" in text and "format 0.5" in text and "mismatch 0.2500" in text
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
    console = Console(file=io.StringIO(), width=80)
    show_samples(tmp_path, Choice(), console, as_json=True)
    assert isinstance(console.file, io.StringIO)
    assert json.loads(console.file.getvalue())["advantage"] == 1.5


def test_a_folder_without_episodes_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no episodes in samples.jsonl"):
        show_samples(tmp_path, Choice(), Console(file=io.StringIO()))


def test_no_text_of_an_episode_can_become_html(tmp_path: Path) -> None:
    run_with(tmp_path, episode("0.0", text=HOSTILE, prompt=HOSTILE, answer=HOSTILE, error=HOSTILE))
    page = write_report(tmp_path).read_text()
    assert "alert(1)</script>" not in page and "<img" not in page and "<!--" not in page
    elements = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    assert len(elements) == 5, "two of data and three of code"
    [row] = json.loads(elements[1])
    assert row["prompt"] == row["turns"][0]["text"] == HOSTILE
    assert ".innerHTML" not in page and "insertAdjacentHTML" not in page


def test_the_page_of_an_unfinished_run_loads_itself_again(tmp_path: Path) -> None:
    run_with(tmp_path, episode("0.0"))
    assert '"reload_s":30}' in write_report(tmp_path).read_text()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "finished", "step": 1, "time/elapsed_s": 1.0}\n')
    assert '"reload_s":0}' in write_report(tmp_path).read_text()
