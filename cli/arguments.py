"""Parses and checks arguments that several commands share: configurations with overrides, names, and folders."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..trainers.errors import UserError
from .outcome import MISTAKE


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one sentence and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISTAKE, f"headrace: {message} (`{self.prog} --help` shows what is expected)\n")


def config_and_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that reads a configuration."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument(
        "overrides",
        metavar="key.sub=value",
        nargs="*",
        default=[],
        help="override of a config key; text is taken as it is typed, any other value is YAML",
    )


def path(text: str) -> Path:
    """Return the path that an argument names. Shells leave the `~` of `--out=~/results` to the program."""
    return Path(text).expanduser()


def known(option: str, given: tuple[str, ...], every: Sequence[str]) -> tuple[str, ...]:
    """Return the names in `given`. Raises UserError for a name that is not in `every`."""
    for name in given:
        if name not in every:
            raise UserError(f"{option}: got {name!r}, expected some of {', '.join(every)}")
    return given


def chosen(given: Iterable[str] | None, every: Iterable[str]) -> tuple[str, ...]:
    """Return the names in `given` without duplicates; all of `every` if `given` is None. An item of `given` can hold
    several names separated by commas."""
    names = every if given is None else [name for item in given for name in item.split(",") if name]
    return tuple(dict.fromkeys(names))


def results_folder(arguments: argparse.Namespace, what: str, *, new: bool = False) -> Path:
    """Return the folder for a benchmark's results, which is `--out` or else a new folder in `runs`. Raises UserError if
    `--out` is a file, or if `new` is true and `--out` is not empty."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = arguments.out or Path("runs") / f"bench-{what}-{now}"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: {folder} is a file, expected a folder or a new name")
    if new and folder.exists() and any(folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty, expected a new folder")
    return folder


def expect_gpus(count: int, asked: str) -> None:
    """Raise UserError if torch sees fewer than `count` GPUs. asked: the key that needs them, and its value, such as
    `--gpus: got 4`, which a machine without them can have otherwise."""
    import torch  # Commands that need no GPU do not wait for it.

    if torch.cuda.device_count() < count:
        raise UserError(
            f"{asked}, expected a machine with {count} GPU(s), but this one has {torch.cuda.device_count()}"
        )


def import_from_here() -> None:
    """Add the working folder to the import path. This process can then import rewards, tools and samplers that are
    defined there, as the run's actors can."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def bench_command(
    kinds: Any, name: str, command: Callable[[argparse.Namespace], int], what: str
) -> argparse.ArgumentParser:
    """Add the benchmark `headrace bench NAME`, which `command` runs, and return its parser.

    what: description, beginning in lower case.
    """
    parser = kinds.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("--out", type=path, metavar="DIR", help="folder for the results; default: runs/bench-...")
    parser.set_defaults(command=command)
    return parser
