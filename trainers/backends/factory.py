"""Builds the train backend that the configuration names."""

from __future__ import annotations

from dataclasses import replace

from ...actors.train_backend import TrainBackend
from ...actors.weight_sync.base_offer import KnownBase
from .config import BackendConfig

MODULES = {
    "fsdp": f"{__package__}.fsdp.backend",
    "megatron": f"{__package__}.megatron.backend",
    "scripted": f"{__package__}.scripted",
}
"""Name of the module of each backend, by the value of `trainer.backend`. Importing a module takes seconds."""


def build_backend(config: BackendConfig, rank: int, world: int, known: KnownBase | None = None) -> TrainBackend:
    """Build the train backend that `config` names, as rank `rank` of `world` ranks. Collective when `world` > 1.
    known: see `BackendConfig.known`.

    With more than one rank the default process group must exist and have `world` ranks; one rank needs none. Raises
    ValueError when `world` does not match `config.topology` or a setting cannot be used; the error names the key, its
    value and what was expected.
    """
    if world != config.topology.world:
        raise ValueError(f"world: got {world} ranks, expected the {config.topology.world} of {config.topology}")
    config = replace(config, known=known)
    kind = config.trainer.backend
    if kind == "fsdp":
        from .fsdp.backend import FsdpBackend  # A dry run must not spend seconds on importing transformers.

        return FsdpBackend(config, rank, world)
    if kind == "megatron":
        from .megatron.backend import MegatronBackend  # This module needs the optional extra `megatron`.

        return MegatronBackend(config, rank, world)
    if kind == "scripted":
        from .scripted import ScriptedBackend

        return ScriptedBackend(config, rank, world)
    raise ValueError(f"trainer.backend: got {kind!r}, expected 'fsdp', 'megatron' or 'scripted'")
