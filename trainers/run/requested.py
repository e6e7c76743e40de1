"""Turns what a user asked for, on the command line or in Python, into the checked configuration of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..config.config import Config, with_run_dir
from ..config.load import build_config
from ..errors import ConfigError, UserError
from ..simulation.config import simulation_section


def requested_run(
    sections: Mapping[str, Any],
    overridden: Collection[str],
    folder: Path,
    *,
    resume: bool,
    supervised: bool = False,
) -> Config:
    """Return the configuration of the run to start, with `run.dir` set.

    sections, overridden, folder: see `build_config`. supervised: whether it must be, or else must not be, one of
    supervised training. Raises UserError for a user's mistake. A ConfigError also has the mistakes that a start would
    find.
    """
    try:
        config = build_config(sections, overridden, of_old_run=resume, folder=folder)
    except ConfigError as error:
        if error.config is None:
            raise
        from .checks.preflight import with_later_problems  # This module imports torch.

        raise with_later_problems(error, resume=resume) from None
    if bool(config.sft.train) != supervised:
        raise UserError(
            "sft.train: not set, expected a file of conversations"
            if supervised
            else "sft.train: got a file with `headrace train`, expected it with `headrace sft`; sft.train=[] unsets it"
        )
    simulation_section(config)  # A run does not use this section, but mistakes in it are reported at once.
    if resume and config.run.dir is None:
        raise UserError("--resume: run.dir is not set, expected the folder of the run to continue")
    return with_run_dir(config)
