"""Prints status lines, tables and results of commands to the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .outcome import DONE, FAILED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def new_console() -> Console:
    """Return a console on standard output. `--help` and `headrace doctor --constraints` need no package but Headrace,
    so rich is imported only here and where tables are made."""
    from rich.console import Console

    return Console()


@contextmanager
def status_line(first: str) -> Iterator[tuple[Console, Callable[[str], None]]]:
    """Context manager that shows a status line on the console while its body runs. Yields the console, and a function
    that replaces the text of the line. first: initial text."""
    console = new_console()
    with console.status(first) as status:
        yield console, lambda line: status.update(line)


def print_table(console: Console, table: Table) -> None:
    """Print a table without truncating cells. If the output is not a terminal, the table is as wide as it needs to be.
    On a terminal that is too narrow, each cell of a row is printed on its own line."""
    needed = console.measure(table, options=console.options.update(width=10_000)).maximum
    if needed <= console.width:
        console.print(table)
    elif not console.is_terminal:
        type(console)(file=console.file, width=needed).print(table)
    else:
        console.print(table.title, style="bold", highlight=False)
        headers = [str(column.header) for column in table.columns]
        width = max(map(len, headers))
        for row in zip(*(column.cells for column in table.columns), strict=True):
            lines = [f"{header:<{width}}  {cell}" for header, cell in zip(headers, row, strict=True) if cell]
            console.print("\n".join(lines), "", sep="\n", markup=False, highlight=False, soft_wrap=True)


def show_results(console: Console, table: Table, out: Path) -> int:
    """Print a table and the folder of the results. Returns the exit code."""
    print_table(console, table)
    console.print(f"results: {out}", highlight=False)
    return DONE


def judged(console: Console, complaints: Sequence[str], results: Path) -> int:
    """Print the complaints and the path of the results. Returns the exit code."""
    for line in complaints:
        console.print(f"failed: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
    console.print(f"results: {results}", highlight=False, soft_wrap=True)
    return FAILED if complaints else DONE


def command_line() -> str:
    """Return the command line of this process as a user would type it."""
    return shlex.join(["headrace", *sys.argv[1:]])
