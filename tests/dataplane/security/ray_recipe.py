"""Certificates for Ray's TLS, made by the commands of the page on security."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "security.md"


def certificates(addresses: Sequence[str], folder: Path, *, days: int = 365) -> dict[str, str]:
    """Follow the recipe in `folder`, with one certificate for all addresses. Returns the environment."""
    text = PAGE.read_text()
    block = text[text.index("# once, on one host: an authority") :].split("```")[0]
    *commands, export = [line for line in block.splitlines() if line and not line.startswith("#")]
    names = ",".join(f"IP:{address}" for address in addresses)
    for command in commands:
        command = command.replace("IP:ADDRESS", names).replace("-days 365 -extfile", f"-days {days} -extfile")
        subprocess.run(command, shell=True, check=True, cwd=folder, capture_output=True)
    settings = [part.split("=", 1) for part in shlex.split(export.replace("$PWD", "'$PWD'"))[1:]]
    return {name: value.replace("$PWD", str(folder)) for name, value in settings}
