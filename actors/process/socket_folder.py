"""Finds a folder in which the paths of Unix sockets stay within the system's limit of 107 bytes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

LONGEST = 107
"""Largest number of bytes of a socket's path on Linux."""
BELOW_RAY = len("/ray/session_2026-11-27_15-51-00_123456_1234567/sockets/plasma_store")
"""Number of bytes that Ray adds to its folder in the path of its longest socket."""
BELOW_VLLM = len("/01234567-89ab-cdef-0123-456789abcdef")
"""Number of bytes that vLLM adds to its folder; the socket for its workers' orders needs fewer."""
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders that are tried when the folder for temporary files is too deep."""


def short_folder(folder: str, variable: str, below: int, choices: Sequence[str] = SHORT_FOLDERS) -> str | None:
    """Return a folder for sockets whose paths would be too long in `folder`; None if they fit there. Batch systems
    often give each job a deeply nested folder for temporary files.

    variable: environment variable that names `folder`. below: number of bytes of a socket's path below the folder.
    Raises ValueError if a shorter folder is needed and none of `choices` can be written.
    """
    size = len(os.fsencode(folder))
    if size + below <= LONGEST:
        return None
    for choice in choices:
        if os.access(choice, os.W_OK | os.X_OK):
            return choice
    raise ValueError(
        f"{variable}: got {folder!r} of {size} bytes, expected at most {LONGEST - below}, because a socket's path "
        f"has at most {LONGEST} bytes, and none of {', '.join(choices)} is a folder to write in"
    )


def ray_folder() -> str | None:
    """Return the folder for the files of a Ray that is started here; None for Ray's own choice. Raises ValueError as
    `short_folder` does."""
    variable = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    short = short_folder(os.environ.get(variable, "/tmp"), variable, BELOW_RAY)
    return None if short is None else os.path.join(short, "ray")


def vllm_folder() -> str | None:
    """Return the folder for the sockets of vLLM; None for vLLM's own choice. Raises ValueError as `short_folder`
    does."""
    return short_folder(tempfile.gettempdir(), "TMPDIR", BELOW_VLLM)
