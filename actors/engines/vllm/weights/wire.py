"""Names and reports that the vLLM engine and its workers exchange about weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BACKEND = "headrace"
"""Name under which Headrace's weight-transfer engine is registered in vLLM."""

WORKER = "headrace.actors.engines.vllm.worker.WeightWorker"
"""Import path of the class that vLLM mixes into its workers."""


@dataclass(frozen=True, slots=True)
class PrepareState:
    """A worker's progress in preparing the weight version that was announced to it."""

    version: int
    phase: Literal["none", "receiving", "ready", "failed"]
    staged: bool = False
    """True if the complete version has been received and verified; False if the worker has only joined its transfer."""
    kind: Literal["", "transfer", "value"] = ""
    """Kind of the failure: `transfer` if the version did not arrive completely, `value` if it does not fit the
    model."""
    error: str = ""
    """Description of the failure; "" when there was none."""

    def describe(self) -> str:
        """Describe the state for an error message."""
        return f"version {self.version} is {self.phase}" if self.phase != "none" else "nothing was announced yet"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Outcome of comparing a worker's weights with the trainer's digests."""

    num_compared: int
    """Number of weights that the worker compared."""
    error: str = ""
    """Error that names a weight that differs, or why the comparison failed; "" when nothing differs."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Outcome of loading a version in one worker."""

    seconds: float
    """Seconds that the load took."""
    way: str
    """How the weights were loaded: `in place` (recorded copies into the live parameters were repeated); or `in place by
    the loaders: ` or `layerwise: `, followed by the reason."""
    error: str = ""
    """Error that broke off the load and left a mix of two versions in the model; "" when the load succeeded."""
    in_transfer: bool = False
    """True if the error is that the version did not arrive completely."""
