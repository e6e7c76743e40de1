"""A train backend that records what it is asked for and fed: for tests of what hosts it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from headrace.actors.adapters.spec import AdapterSpec
from headrace.actors.train_backend import MicroBatch, OffloadReport
from headrace.actors.weight_sync.base_offer import BaseRecord
from headrace.actors.weight_sync.plan.regions import Region, held
from headrace.tests.actors.train.replica_ranks import content

MODEL = {"embed": torch.arange(100.0), "half": torch.arange(200).bfloat16(), "bias": torch.arange(3)}


@dataclass
class RecordingBackend:
    """Log-probs are the token ids, halved; the train pass keeps what it was given."""

    writer: bool
    fails_at: int | None
    """Microbatch of the train pass at which it raises."""
    calls: list[str] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)
    adapter: AdapterSpec | None = None
    base_record: BaseRecord | None = None
    shares_features: bool = False

    def begin_step(self, temperature: float = 1.0) -> None:
        self.calls.append(f"begin {temperature}")

    def accumulate(self, micros: Iterable[MicroBatch], count: int) -> None:
        for index, micro in enumerate(itertools.islice(micros, count)):
            if index == self.fails_at:
                raise FloatingPointError("by chance")
            self.seen.append(content(micro))
        self.calls.append(f"accumulate {count}")

    def finish_step(self) -> dict[str, float]:
        self.calls.append("finish")
        return {"train/loss": 0.5}

    def abort_step(self) -> None:
        self.calls.append("abort")

    def logprobs(
        self, micros: Iterable[MicroBatch], count: int, *, reference: bool = False, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        self.calls.append(f"logprobs {'ref' if reference else 'prev'} {temperature}")
        taken = list(itertools.islice(micros, count))
        factor = 4 if reference else 2
        return [micro.batch.jagged("input_ids").values / factor for micro in taken] if self.writer else []

    def weight_specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in MODEL.items()}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Halves of rank 0 and 1, put together one tensor at a time."""
        for name, tensor in MODEL.items():
            self.calls.append(f"gather {name}")
            if dist.is_initialized():
                part = tensor.clone() if dist.get_rank() == 1 else torch.zeros_like(tensor)
                dist.all_reduce(part)
                tensor = part if dist.get_rank() == 0 else part[:0]
            yield name, tensor

    def weight_regions(self) -> Sequence[Sequence[Region]]:
        return [[region for name, tensor in MODEL.items() for region in held(name, tensor.shape)]]

    def own_weights(self) -> Callable[[str], torch.Tensor]:
        return MODEL.__getitem__

    def save(self, path: str, *, wait: bool = True) -> None:
        self.calls.append(f"save {path}")

    def wait_saved(self) -> None:
        self.calls.append("wait_saved")

    def load(self, path: str) -> None:
        self.calls.append(f"load {path}")

    def export_model(self, path: str) -> None:
        self.calls.append(f"export_model {path}")

    def offload(self) -> OffloadReport:
        self.calls.append("offload")
        return OffloadReport(7, 0.5, 0.1, 0.0, 0, 0)

    def onload(self) -> OffloadReport:
        self.calls.append("onload")
        return OffloadReport(7, 0.5, 0.1, 0.0, 0, 0)

    def group_holders(self) -> Sequence[object]:
        return (self,)

    def close(self) -> None:
        self.calls.append("close")
