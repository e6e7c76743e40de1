"""Names and reports that the vLLM engine and its workers exchange about weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BACKEND = "headrace"
"""Name of our weight-transfer engine in vLLM's registry."""

WORKER = "headrace.actors.engines.vllm.worker.WeightWorker"
"""Import path of the class that vLLM mixes into its workers."""


@dataclass(frozen=True, slots=True)
class PrepareState:
    """Progress of a worker with the version that was announced to it."""

    version: int
    phase: Literal["none", "receiving", "ready", "failed"]
    staged: bool = False
    """Whether the whole version is there, verified; False when it was only joined."""
    kind: Literal["", "transfer", "value"] = ""
    """Kind of the failure: `transfer` when the version did not arrive whole, `value` when it does not fit the model."""
    error: str = ""
    """Description of the failure; "" without one."""

    def describe(self) -> str:
        """Describe the state for an error message."""
        return f"version {self.version} is {self.phase}" if self.phase != "none" else "nothing was announced yet"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Outcome of loading a version in one worker."""

    seconds: float
    """Seconds that the load took."""
    way: str
    """Way in which the weights were loaded: `in place`, or `in place by the loaders: ` or `layerwise: ` and the
    reason."""
    error: str = ""
    """Error of a load that broke off, after which the model mixes two versions; "" when it ended well."""
    in_transfer: bool = False
    """Whether the error is that the version did not arrive whole."""
