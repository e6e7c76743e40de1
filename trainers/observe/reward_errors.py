"""Tells why rewards failed: each kind of failure once on the terminal, all of them in reward_errors.jsonl."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

MAX_TOLD = 10
"""Number of kinds of failures that a run tells on the terminal."""

_log = logging.getLogger(__name__)


class RewardErrors:
    """Keeps the first failure of each rollout call, in a file that is made with the first of them."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """folder: the run folder."""
        self._path = Path(folder) / "reward_errors.jsonl"
        self._told: set[str] = set()

    def note(self, step: int, failed: int, rows: int, error: str) -> None:
        """Note that `failed` of a call's `rows` had no valid reward in `step`; error: the first one's own words."""
        if not failed:
            return
        line = {"step": step, "failed_rows": failed, "rows": rows, "first_error": error}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        kind = kind_of(error)
        if kind not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(kind)
            _log.warning(
                "step %d: %d of %d rows are not trained on: %s (told once; all such errors are in %s)",
                step, failed, rows, error, self._path,
            )  # fmt: skip


def kind_of(error: str) -> str:
    """Return the error without what differs from row to row: a reward's name and exception, or words without quotes."""
    reward = re.match(r"reward '[^']*' raised \w+", error)
    return reward[0] if reward else re.sub(r"'[^']*'|\d+", "*", error)
