"""Defines what a transfer plan is made of as a message, so that all processes of an update make the same plan."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ....codecs import messages
from ....codecs.schema import DTYPES
from .regions import Party, Region, Specs
from .transfer_plan import TransferPlan, plan_transfer


class LocalTensors(Mapping[str, torch.Tensor]):
    """The local tensors of a rank by name. Each is read when it is needed, because some backends make a copy then."""

    def __init__(self, read: Callable[[str], torch.Tensor], regions: Sequence[Region]) -> None:
        """read: function that returns a local tensor by its name, contiguous. regions: the rank's regions."""
        self._read = read
        self._names = dict.fromkeys(region.tensor for region in regions)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """The arguments of `plan_transfer` in a form that `messages` can encode."""

    weights: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, name of the dtype, and shape of each weight."""
    senders: tuple[Party, ...]
    receivers: tuple[Party, ...]
    bucket_bytes: int

    @staticmethod
    def of(specs: Specs, senders: tuple[Party, ...], receivers: tuple[Party, ...], bucket_bytes: int) -> PlanArguments:
        """Return the arguments for weights of these specs."""
        weights = tuple((name, str(dtype).removeprefix("torch."), shape) for name, (dtype, shape) in specs.items())
        return PlanArguments(weights, senders, receivers, bucket_bytes)

    @property
    def specs(self) -> Specs:
        return {name: (DTYPES[dtype], shape) for name, dtype, shape in self.weights}

    @property
    def message(self) -> bytes:
        """The arguments as bytes; regions of ranks and layers are alike, so that they take a fraction of their size."""
        return zlib.compress(messages.encode(self), 1)


@functools.lru_cache(maxsize=2)
def read_arguments(message: bytes) -> tuple[PlanArguments, TransferPlan]:
    """Return the arguments that `PlanArguments.message` has encoded, and their plan. The last two are kept, because
    most updates have the plan of the one before. Raises ValueError for bytes that are no arguments."""
    try:
        arguments = messages.decode(zlib.decompress(message), PlanArguments)
    except zlib.error as error:
        raise ValueError(f"the arguments of a plan are damaged: {error}") from error
    return arguments, plan_transfer(arguments.specs, arguments.senders, arguments.receivers, arguments.bucket_bytes)
