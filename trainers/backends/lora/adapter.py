"""Describes the adapter that a train backend trains, with its start values and the digest of its base."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ....actors.adapters.base_digest import base_digest
from ....actors.adapters.peft_folder import read_adapter, write_adapter
from ....actors.adapters.spec import AdapterSpec
from ....actors.weight_sync.base_offer import KnownBase
from ...errors import UserError
from ..config import BackendConfig
from ..lora_config import LoraConfig
from ..weight_stream import WeightSource
from .matrices import from_wire, target_of, wire_module, wire_name
from .recorded_base import RecordedSource
from .start import start_value

BASE = "lora.base"
"""Name of the digest of the base in a checkpoint."""
_SEED = 0
"""Seed of the start values. It is no setting, so that all ranks and both backends start with the same matrices."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of a run. Every rank has the same object."""

    config: LoraConfig
    spec: AdapterSpec
    given: Mapping[str, torch.Tensor] | None
    """Tensors of the folder `model.adapter`, by their names in PEFT's format; None without one."""

    @staticmethod
    def of(config: BackendConfig, rank: int, world: int, device: torch.device) -> Adapter | None:
        """Return the adapter that `config` describes; None if the run trains all weights. Collective.

        Raises ValueError if `model.adapter` is no folder of such an adapter.
        """
        lora = config.trainer.lora
        if not lora.rank:
            if config.adapter is not None:
                raise ValueError(
                    f"model.adapter: got {config.adapter!r}, expected trainer.lora.rank to be set to its rank"
                )
            return None
        known = config.known
        digest = _shared_digest(config.base, rank, world, device) if known is None else known.record.base
        spec = AdapterSpec(lora.rank, lora.chosen_alpha, digest)
        return Adapter(lora, spec, None if config.adapter is None else _given(config.adapter, lora))

    def expect_matrices(self, names: Iterable[str]) -> None:
        """Raise ValueError unless the folder `model.adapter`, if there is one, has exactly these matrices."""
        if self.given is None:
            return
        wanted = set(map(wire_name, names))
        other = sorted(wanted ^ self.given.keys())
        if other:
            what = "has no" if other[0] in wanted else "has a"
            raise ValueError(
                f"model.adapter: the folder {what} tensor {other[0]!r}, expected matrices for exactly the layers of "
                f"trainer.lora.targets ({len(other)} names differ)"
            )

    def start(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the whole start value of the parameter `name`, float32 of `shape`. Raises ValueError if the folder
        `model.adapter` has a matrix of another shape."""
        if self.given is not None:
            try:
                return from_wire(name, self.given[wire_name(name)], tuple(shape))
            except ValueError as error:
                raise ValueError(f"model.adapter: {error}") from error
        if target_of(name)[1] == "B":
            return torch.zeros(shape)
        return start_value(wire_module(name), tuple(shape), self.config.init, _SEED, self.config.rank)

    def recorded(self, source: WeightSource, known: KnownBase | None) -> RecordedSource:
        """Return a source of the base that compares what it reads with what is `known` of it."""
        return RecordedSource(source, self.spec.base, known)

    def write(self, path: str, *, base: str, tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        """Write the adapter as the folder `adapter` in the folder `path`. base: model to which it belongs. tensors: its
        matrices by their names in PEFT's format. names: their names in training."""
        write_adapter(
            os.path.join(path, "adapter"),
            base=base,
            rank=self.spec.rank,
            alpha=self.spec.alpha,
            dropout=self.config.dropout,
            tensors=tensors,
            parameters={target_of(name)[0] for name in names if not name.endswith(".weight")},
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint has of the base: the bytes of its digest."""
        return {BASE: torch.tensor(list(bytes.fromhex(self.spec.base)), dtype=torch.uint8)}

    def expect_base(self, path: str, stored: torch.Tensor) -> None:
        """Raise UserError unless the checkpoint `path`, whose digest is `stored`, belongs to this base."""
        found = bytes(stored.tolist()).hex()
        if found != self.spec.base:
            rounded = f", as trainer.lora.base={self.config.base} rounds them," * self.config.rounds
            raise UserError(
                f"model.path: its weights{rounded} have the digest {self.spec.base}, expected {found}, that of the "
                f"base with which the run began, because the adapter in the checkpoint {path} belongs to it"
            )


def _given(folder: str, lora: LoraConfig) -> Mapping[str, torch.Tensor]:
    found = read_adapter(folder)
    for key, got, wanted in (("rank", lora.rank, found.rank), ("alpha", lora.chosen_alpha, found.alpha)):
        if got != wanted:
            raise ValueError(f"trainer.lora.{key}: got {got}, expected {wanted}, that of model.adapter={folder!r}")
    return found.tensors


def _shared_digest(model: str, rank: int, world: int, device: torch.device) -> str:
    """Return the digest of the weights of `model`, which only rank 0 reads. Raises ValueError on every rank if rank 0
    finds no weights."""
    digest, problem = bytes(16), ""
    if rank == 0:
        try:
            digest = bytes.fromhex(base_digest(model))
        except (OSError, ValueError) as error:
            problem = str(error)
    if world > 1:
        shared = torch.tensor(list(digest), dtype=torch.uint8, device=device)
        dist.broadcast(shared, 0)
        digest = bytes(shared.tolist())
    if problem or not any(digest):
        raise ValueError(problem or f"model.path: rank 0 found no weights of {model!r}")
    return digest.hex()
