"""Opens a run's seat in an engine that several runs share."""

from __future__ import annotations

from typing import Any

from ...weight_sync.transports.protocol import ReceiverConfig
from ..protocol import GenerationEngine


def open_seat(kind: str, host: Any, name: str, receiver: ReceiverConfig | None, version: int) -> GenerationEngine:
    """Return an engine for one of several runs that share `host`, each with its own adapter and versions.

    kind: kind of the engine, `hf` or `vllm`. name: name of the run, unique among the seats. receiver: settings with
    which the run's adapters are received. version: policy version of the base alone. Raises ValueError if the engine
    has no room for adapters.
    """
    if kind == "hf":  # Each kind of engine takes seconds to import.
        from .hf_seat import HfSeat

        return HfSeat(host, name, receiver, version)
    from .vllm_seat import VllmSeat

    return VllmSeat(host, name, receiver, version)
