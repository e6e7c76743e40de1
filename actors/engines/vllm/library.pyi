"""Types of `library.py`: everything is `Any`, so that pyright finds the same with vLLM installed as without it."""

from typing import Any

def __getattr__(name: str) -> Any: ...
