"""Turns what a user asked for, on the command line or in Python, into the checked configuration of a run."""

from __future__ import annotations

from collections.abc import Callable

from ..config.config import Config, with_run_dir
from ..errors import ConfigError, UserError
from ..simulation.config import simulation_section


def requested_run(load: Callable[[], Config], *, resume: bool, supervised: bool = False) -> Config:
    """Return the configuration of the run to start, with `run.dir` set. load: loads the configuration. supervised:
    whether it must be, or else must not be, one of supervised training.

    Raises UserError for a user's mistake. A ConfigError of the loader also has the mistakes that a start would find.
    """
    try:
        config = load()
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
