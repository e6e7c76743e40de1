"""Checks that each connection of a new gloo group ends at a member of the run.

gloo takes any peer for the member of whom it waits that connects to its port with a small number. Such a peer would
receive what the group sends.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed import AllToAllOptions

_PROOF_BYTES = 32


def prove_members(group: Any, key: bytes, name: str) -> None:
    """Have the members of a gloo group prove to each other that they know the run's key. The call is collective.

    group: torch's ProcessGroupGloo. name: name that no other group of the run has. Raises ConnectionError when a
    connection ends at another process, also if that one says nothing until the group's timeout.
    """
    rank, others = group.rank(), range(group.size())
    expected = _proofs(key, name, ((other, rank) for other in others))
    found = torch.zeros_like(expected)
    try:
        own = _proofs(key, name, ((rank, other) for other in others))
        group.alltoall_base(found, own, [], [], AllToAllOptions()).wait()
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise ConnectionError(
            f"process group {name}: rank {rank} got no proof of the run's key from each other rank, so a rank is lost, "
            f"or a stranger has connected to gloo's port: {why}"
        ) from None
    right = (found == expected).view(-1, _PROOF_BYTES).all(1).tolist()
    if wrong := [other for other in others if not right[other]]:
        raise ConnectionError(
            f"process group {name}: what rank {rank} is connected to in the place of rank {wrong[0]} does not know the "
            "run's key, so a stranger has connected to gloo's port"
        )


def _proofs(key: bytes, name: str, pairs: Iterable[tuple[int, int]]) -> torch.Tensor:
    """Return the proof of each (sender, receiver), as uint8 `[pairs * 32]`."""
    texts = (f"headrace member {sender} {receiver} of {name}" for sender, receiver in pairs)
    return torch.frombuffer(
        bytearray(b"".join(hmac.digest(key, text.encode(), "sha256") for text in texts)), dtype=torch.uint8
    )
