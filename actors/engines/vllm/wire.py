"""What the engine and its workers tell each other about weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BACKEND = "headrace"
"""Name of the weight-transfer engine in vLLM's registry."""

WORKER = "headrace.actors.engines.vllm.worker.WeightWorker"
"""Import path of what is mixed into vLLM's workers."""


@dataclass(frozen=True, slots=True)
class PrepareState:
    """How far a worker is with the version it was told of."""

    version: int
    phase: Literal["none", "receiving", "ready", "failed"]
    kind: Literal["", "transfer", "value"] = ""
    """Of the failure: it did not arrive whole, or is no version of this model."""
    error: str = ""

    def describe(self) -> str:
        """For errors."""
        return f"version {self.version} is {self.phase}" if self.phase != "none" else "nothing was announced yet"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker did to load a version."""

    seconds: float
    way: str
    """`in place`; `in place by the loaders: ` or `layerwise: `, and why."""
    error: str = ""
    """Of a load that broke off; the model is then in pieces."""
    in_transfer: bool = False
    """Whether the error is that the version did not arrive whole."""
