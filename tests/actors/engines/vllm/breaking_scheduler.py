"""A scheduler of vLLM that breaks at the first request; tests pass it through to the engine process."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class BreakingScheduler(Scheduler):
    """Raises LookupError in the engine process as soon as it has a request to schedule."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_unfinished_requests():
            raise LookupError("broken by a test")
        return super().schedule(*args, **kwargs)
