"""Reward functions of tests that run in processes of their own, which import this file and nothing that takes time."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any


def blocking(prompt: Any, response: str, finish_reason: str) -> float:
    if response == "hang":
        time.sleep(3600)
    if response == "die":
        os._exit(3)
    if response == "wrong":
        raise KeyError(prompt.fields["level"])
    print("this does not disturb the answers")
    return float(response == prompt.answer) + os.getpid() / 1e9


async def returns(prompt: Any, response: str, finish_reason: str) -> Any:
    return {"none": None, "text": "1", "nan": float("nan"), "dict": {}}.get(response, 1.0)


def returns_blocking(prompt: Any, response: str, finish_reason: str) -> Any:
    return asyncio.run(returns(prompt, response, finish_reason))


def group_returns(prompt: Any, responses: list[str], finish_reasons: list[str]) -> Any:
    import numpy as np
    import torch

    made: dict[str, Any] = {
        "list": [1.0, 0.0], "tuple": (1, 0), "array": np.array([1.0, 0.0]), "tensor": torch.tensor([1.0, 0.0]),
        "set": {0.0, 1.0}, "dict": {1.0: 1.0, 0.0: 0.0}, "str": "10", "bytes": b"10", "none": [1.0, None],
        "matrix": np.ones((2, 1)),
    }  # fmt: skip
    return made[responses[0]]
