"""Parses the command line, runs the command that it names, and turns exceptions into exit codes."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from ..dataplane.imports import MissingExtra
from ..trainers.errors import ConfigError, UserError
from ..version import __version__
from .arguments import Parser
from .bench import add_bench_commands
from .launch import add_launch_commands
from .outcome import BROKEN_PIPE, INTERRUPTED, MISTAKE, TERMINATED, Terminated, failure, mistake, output_is_closed
from .pool import add_pool_commands
from .results import add_result_commands
from .runs import add_run_commands
from .supplies import add_supply_commands

_EPILOG = """examples:
  headrace doctor
  headrace doctor --model my-moe rollout.engine=vllm
  headrace recipe quickstart --out first
  cd first && headrace train config.yaml
  headrace train my.yaml trainer.lr=1e-4 dataplane.store.kind=ray run.dir=runs/first
  headrace train my.yaml --dry-run
  headrace bench transfer --quick

`headrace COMMAND --help` shows the arguments of a command. Documentation: docs/index.md.
"""


_REQUIRED = {
    *("torch", "tensordict", "ray", "transformers", "msgspec", "numpy", "xxhash", "pydantic", "yaml", "rich"),
    *("prometheus_client", "psutil", "safetensors"),
}
"""Modules of the packages that an installation brings, unless it was made with `pip install --no-deps`."""
_NOISY = ("torchao", "torch.utils._pytree")
"""Loggers that warn wherever torchao is installed, of CUDA libraries that a machine without a GPU lacks."""
_INSTALL = "run headrace doctor --constraints cpu > cpu.txt and pip install -c cpu.txt headrace, or take the set gpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` defaults to the process's arguments."""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as stop:  # argparse exits with 0 after --help and --version, and with 2 after a mistake.
        return stop.code if isinstance(stop.code, int) else MISTAKE
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    return ended(lambda: arguments.command(arguments))


def ended(command: Callable[[], int]) -> int:
    """Run a command, report its exception if it raises one, and return the exit code."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError as error:
        return BROKEN_PIPE if output_is_closed() else failure(error)
    except ConfigError as error:
        return mistake(error.problems)
    except (UserError, MissingExtra) as error:
        return mistake([str(error)])
    except ModuleNotFoundError as error:
        if error.name not in _REQUIRED:
            return failure(error)
        return mistake([f"the package {error.name} is not installed, but this command needs it; {_INSTALL}"])
    except Terminated:
        print("headrace: terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return failure(error)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments, with the function to call as `command`. Raises SystemExit after --help, after
    --version and for mistakes."""
    parser = Parser(
        prog="headrace",
        description="RL post-training for language models, built around its data plane.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_run_commands(commands)
    add_launch_commands(commands)
    add_supply_commands(commands)
    add_result_commands(commands)
    add_pool_commands(commands)
    add_bench_commands(commands)
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(MISTAKE)
    arguments, rest = parser.parse_known_args(argv)
    # argparse treats overrides after an option as unknown arguments. Malformed overrides are refused later, when all
    # are read.
    if hasattr(arguments, "overrides"):
        arguments.overrides = [*arguments.overrides, *(word for word in rest if not word.startswith("-"))]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        overrides = "; overrides are written key.sub=value, without dashes" if hasattr(arguments, "overrides") else ""
        commands.choices[argv[0]].error(f"unknown argument {rest[0]!r}{overrides}")
    return arguments
