"""Reads samples.jsonl of a run folder, joins each episode with its values from training, and prints the episodes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ...actors.process.json_lines import read_lines
from ...actors.sample_file import EPISODE, TRAINED, TRAINING
from ..errors import UserError

FILE = "samples.jsonl"
SHOWN = {"reward", "prompt", "turns", "finish_reason", "error"}
"""Entries of an episode that are shown."""
Row = dict[str, Any]
"""One episode as `read_samples` returns it."""


def read_samples(path: str | os.PathLike[str]) -> list[Row]:
    """Read a samples.jsonl as one dict for each episode, in the order of generation; [] without such a file.

    The dict has the entries of the line `episode` (see `actors/sample_file.py`). For a training prompt it also has
    `step`, `advantage` and `trained_logprobs`; they are None until a step trains on the row. For a held-out prompt,
    `step` is the evaluated version. A row that was generated again replaces the earlier one. Torn lines are
    left out, as by `read_lines`. Raises UserError that names file and line for an object of another kind.
    """
    try:
        lines = read_lines(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    episodes: dict[tuple[str, str, int], Row] = {}
    trained: dict[str, Row] = {}
    for number, line in lines:
        try:
            if line["kind"] == TRAINED:
                trained[line["key"]] = line
                continue
            training = line["set"] == TRAINING
            identity = (line["set"], line["key"], 0 if training else line["version"])
            episodes.pop(identity, None)
            episodes[identity] = {name: value for name, value in line.items() if name != "kind"}
            assert line["kind"] == EPISODE
            if missing := SHOWN - line.keys():
                raise KeyError(min(missing))
        except (TypeError, KeyError, AssertionError) as error:
            raise UserError(f"{path} line {number}: this is not a line of samples ({error!r})") from error
    rows = []
    for (name, key, _), row in episodes.items():
        found = trained.get(key, {}) if name == TRAINING else {"step": row["version"]}
        joined = {entry: found.get(entry) for entry in ("step", "advantage")}
        rows.append({**row, **joined, "trained_logprobs": found.get("logprobs")})
    return rows


def mismatch(row: Row) -> float | None:
    """Return the mean distance between the trainer's and the engine's log-probs of a row's tokens. None if the trainer
    has computed no log-probs for the row; infinite if a log-prob is not finite."""
    engine = [value for turn in row["turns"] for value in turn.get("logprobs", ())]
    trainer = row["trained_logprobs"]
    if not trainer or len(trainer) != len(engine):
        return None
    pairs = list(zip(trainer, engine, strict=True))
    return math.inf if None in (*trainer, *engine) else sum(abs(a - b) for a, b in pairs) / len(pairs)


@dataclass(frozen=True, slots=True)
class Choice:
    """Selection of episodes for the terminal, from the options of `headrace samples`."""

    show: str = "all"
    """Kind of the selection, a key of SHOWS."""
    name: str | None = None
    """Name of the set of prompts, such as `train` or `validation`; None for all sets."""
    step: int | None = None
    search: str = ""
    """Text that the prompt or the answer must contain, ignoring case."""
    limit: int = 5


SHOWS: dict[str, tuple[Callable[[Row], bool], Callable[[Row], Any] | None]] = {
    "all": (lambda row: True, None),
    "best": (lambda row: row["reward"] is not None, lambda row: -row["reward"]),
    "worst": (lambda row: row["reward"] is not None, lambda row: row["reward"]),
    "mismatch": (lambda row: mismatch(row) is not None, lambda row: -(mismatch(row) or 0.0)),
    "truncated": (lambda row: row["finish_reason"] == "length", None),
    "failed": (lambda row: bool(row["error"]), None),
    "untrained": (lambda row: row["set"] == TRAINING and row["step"] is None, None),
}
"""Name of a selection -> (function that returns whether a row belongs to it, sort key; None for latest first)."""


def select(rows: Sequence[Row], choice: Choice) -> list[Row]:
    """Return the rows that `choice` selects, at most `choice.limit`."""
    belongs, key = SHOWS[choice.show]
    wanted = choice.search.lower()
    found = [
        row
        for row in reversed(rows)
        if belongs(row)
        and choice.name in (None, row["set"])
        and choice.step in (None, row["step"])
        and wanted in "\n".join([row["prompt"], *(turn["text"] for turn in row["turns"])]).lower()
    ]
    if key is not None:
        found.sort(key=key)
    return found[: choice.limit]


def show_samples(run_dir: Path, choice: Choice, console: Console, *, as_json: bool = False) -> int:
    """Print the episodes of a run folder that `choice` selects, for people or as one JSON object per line. Returns
    their number. Raises UserError if the folder has no episodes or a broken file."""
    rows = read_samples(run_dir / FILE)
    if not rows:
        raise UserError(
            f"{run_dir}: there are no episodes in {FILE}, expected a run folder with logging.samples.every > 0"
        )
    found = select(rows, choice)
    for row in found:
        if as_json:
            console.file.write(json.dumps(row, ensure_ascii=False) + "\n")
        else:
            _print(row, console)
    if not as_json:
        sets = ", ".join(dict.fromkeys(row["set"] for row in rows))
        console.print(f"{len(found)} of {len(rows)} episodes ({sets})", markup=False, highlight=False)
    return len(found)


def facts(row: Row) -> str:
    """Return the facts about an episode in one line."""
    step, versions = row["step"], row["versions"]
    parts = [f"{row['set']} {row['key']}", f"step {step}" if step is not None else "not trained on"]
    parts.append("version " + "-".join(str(version) for version in dict.fromkeys(versions)) if versions else "")
    parts.append(f"reward {row['reward']:g}" if row["reward"] is not None else "no reward")
    parts += [f"{name} {value:g}" for name, value in row["rewards"].items() if len(row["rewards"]) > 1]
    parts.append(f"advantage {row['advantage']:+.3g}" if row["advantage"] is not None else "")
    parts += [f"{row['response_tokens']} tokens", row["finish_reason"]]
    distance = mismatch(row)
    parts.append(f"mismatch {distance:.4f}" if distance is not None else "")
    return ", ".join(part for part in parts if part)


def _print(row: Row, console: Console) -> None:
    console.print(Text(facts(row), style="bold"))
    if row["error"]:
        kind = row.get("failure")  # Lines of earlier versions have none.
        console.print(Text(f"error{f' ({kind})' if kind else ''}: {row['error']}", style="red"))
    console.print(Text.assemble(("prompt> ", "bright_black"), row["prompt"]))
    for turn in row["turns"]:
        style = "bright_blue" if turn["role"] == "policy" else "magenta"
        console.print(Text.assemble((f"{turn['role']}> ", style), turn["text"]))
    if row["tokens_left_out"]:
        console.print(Text(f"({row['tokens_left_out']} tokens in the middle are left out)", style="bright_black"))
    if row["answer"]:
        console.print(Text.assemble(("expected> ", "bright_black"), row["answer"]))
    console.print()
