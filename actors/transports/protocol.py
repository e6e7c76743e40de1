"""What brings weights from the trainer to the engines: a sender beside the one, a receiver in each of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """A published version of the weights. Of constant size: it goes through the driver, the weights do not."""

    version: int
    kind: str
    """The transport's."""
    location: str
    """Where receivers find it; the transport's own."""
    num_bytes: int
    """Of all weights."""


class WeightTransferError(RuntimeError):
    """A version of the weights did not arrive whole; names version, bucket and path. The old one is served on."""


class WeightSender(Protocol):
    """Publishes weights; in the process that has them. The last two versions stay readable."""

    def send(self, version: int, named: Mapping[str, torch.Tensor]) -> WeightManifest:
        """Publish `named` (HF name -> full tensor) as `version`; whole or not at all.

        Returns when receivers can read it. Raises ValueError unless versions rise.
        """
        ...

    def close(self) -> None:
        """Remove what was published. Idempotent."""
        ...


class WeightReceiver(Protocol):
    """Fetches published weights; in every engine's process."""

    def receive(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        """The version's tensors, verified, in memory of their own. Raises WeightTransferError."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
