"""Reports failed rows: each kind of failure once on the terminal, and every failed row in a file."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ...actors.process.json_lines import append, encoded

MAX_TOLD = 10
"""Largest number of kinds of failures that a run reports on the terminal."""

_log = logging.getLogger(__name__)


class RewardErrors:
    """Records the errors of failed rows in reward_errors.jsonl, one line per rollout call with failed rows. The file is
    created with the first line."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """folder: the run folder."""
        self._path = Path(folder) / "reward_errors.jsonl"
        self._told: set[str] = set()

    def note(self, step: int, failed: int, rows: int, errors: Sequence[str]) -> None:
        """Record that `failed` of the `rows` episodes of a rollout call failed. The call ended in `step`. errors: their
        errors; only some of them if there are very many. A no-op if `failed` is 0.
        """
        if not failed:
            return
        line = {"step": step, "failed_rows": failed, "rows": rows, "errors": list(errors)}
        try:
            append(self._path, encoded([line]))
        except OSError as error:  # The run continues without the line.
            _log.warning("step %d: the errors of %d failed rows are not written: %s", step, failed, error.strerror)
        for error in errors:
            kind = kind_of(error)
            if kind not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(kind)
                _log.warning(
                    "step %d: %d of %d episodes failed, one of them with a new error: %s (told once; all errors "
                    "are in %s)", step, failed, rows, error, self._path,
                )  # fmt: skip


def kind_of(error: str) -> str:
    """Return the kind of failure that an error message reports, without the parts that differ between rows. If a reward
    raised an exception, the kind is the reward's name and the type of the exception. Otherwise it is the message with
    quoted text and numbers replaced by `*`."""
    reward = re.match(r"reward '[^']*' raised \w+", error)
    return reward[0] if reward else re.sub(r"'[^']*'|\d+", "*", error)
