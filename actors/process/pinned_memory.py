"""Pins host memory, so that copies between it and a GPU run at the full speed of the link.

torch's own pinned memory is rounded up to a power of two, which would waste up to half of it.
"""

from __future__ import annotations

from typing import Any

import torch


def pin(memory: torch.Tensor) -> None:
    """Pin the memory of a tensor. It must stay where it is until `unpin`. Raises OSError if CUDA refuses."""
    code = int(_cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise OSError(f"{memory.nbytes} bytes of host memory could not be pinned (CUDA error {code})")


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`, before the memory is freed."""
    _cuda_runtime().cudaHostUnregister(memory.data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()
