"""Reads and writes where a running pool of GPUs is, in the pool's folder, without importing Ray."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ...errors import UserError
from ...supervision.cleanup import is_running

SERVER = "server.json"
"""File in a pool's folder that is there for as long as the pool."""
AUTH_MODE = "RAY_AUTH_MODE"
"""Environment variable that says whether Ray's processes prove that they know the cluster's token. Ray reads it when it
is imported."""


@dataclass(frozen=True, slots=True)
class ServedPool:
    """Name, address and process of a pool that is running."""

    name: str
    address: str
    """Address of its Ray cluster, for `pool.address`."""
    auth_mode: str
    """Value of AUTH_MODE with which processes join that cluster."""
    pid: int
    """Process id of `headrace pool start`."""
    num_gpus: int


def write_pool(folder: Path, served: ServedPool) -> None:
    """Write where the pool of `folder` is."""
    draft = folder / f"{SERVER}.new"
    draft.write_text(json.dumps(asdict(served)))
    draft.rename(folder / SERVER)


def find_pool(folder: Path) -> ServedPool:
    """Return where the pool of `folder` is. Raises UserError if no pool is there."""
    try:
        served = ServedPool(**json.loads((folder / SERVER).read_text()))
    except OSError:
        why = f"pool: {folder} has no running pool; `headrace pool start --dir {folder}` starts one"
        raise UserError(why) from None
    if not is_running(served.pid):
        raise UserError(f"pool: that of {folder} was killed; `headrace pool start --dir {folder}` starts it again")
    return served
