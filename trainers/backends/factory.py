"""Backend config to backend: one line for each kind."""

from __future__ import annotations

from ...actors.protocols import TrainBackend
from .config import BackendConfig


def build_backend(config: BackendConfig, rank: int, world: int) -> TrainBackend:
    """The backend of rank `rank` of the `world` ranks of `config.topology`. Collective when `world` > 1.

    The default process group must then exist and have `world` ranks; with one rank none is needed.
    Raises ValueError naming the key, its value and what was expected.
    """
    if world != config.topology.world:
        raise ValueError(f"world: got {world} ranks, expected the {config.topology.world} of {config.topology}")
    if config.kind == "fsdp":
        from .fsdp.backend import FsdpBackend  # transformers: seconds of import that a dry run must not pay

        return FsdpBackend(config, rank, world)
    if config.kind == "megatron":
        from .megatron.backend import MegatronBackend  # the megatron extra, which not everyone has

        return MegatronBackend(config, rank, world)
    if config.kind == "scripted":
        from .scripted import ScriptedBackend

        return ScriptedBackend(config, rank, world)
    raise ValueError(f"trainer.backend: got {config.kind!r}, expected 'fsdp', 'megatron' or 'scripted'")
