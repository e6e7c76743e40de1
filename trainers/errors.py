"""The trainers' exceptions for what only the user can put right.

ValueError
└── UserError      one clear sentence each: what was given, what was expected; the command line prints it and exits 2
    └── ConfigError  the configuration file or an override of it
"""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake that the user can correct; shown without a traceback."""


class ConfigError(UserError):
    """One or more wrong keys or values of the configuration, one sentence each in `problems`."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return ConfigError, (self.problems,)
