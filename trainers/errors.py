"""Defines exceptions for damaged checkpoints, and for mistakes that only the user can correct.

ValueError
├── CheckpointDamaged  a file of a checkpoint is not as it was written
└── UserError      any such mistake, as one sentence; the command line prints it and exits with status 2
    └── ConfigError  a mistake in the configuration file or in an override
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class CheckpointDamaged(ValueError):
    """Raised instead of loading a checkpoint with a file that is not as it was written. The message names both."""


class UserError(ValueError):
    """A mistake that the user can correct. The command line shows its message without a traceback."""


class ConfigError(UserError):
    """One or more wrong keys or values in the configuration. `problems` describes each in one sentence."""

    def __init__(self, problems: Sequence[str], config: Any = None) -> None:
        """Keep the problems, and the configuration whose values do not fit each other.

        config: None if a key or a value is wrong by itself. With a configuration, further checks can find more
        mistakes."""
        self.problems = tuple(problems)
        self.config = config
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return ConfigError, (self.problems,)
