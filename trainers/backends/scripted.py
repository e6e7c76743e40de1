"""The scripted backend reads its rows like any train backend, but has no model and sleeps for configured times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ...actors.adapters.spec import AdapterSpec
from ...actors.train_backend import MicroBatch, OffloadReport
from ...actors.weight_sync.base_offer import BaseRecord
from ...actors.weight_sync.plan.regions import Region, held
from .checkpoint_files import Checkpointer, draft_of, publish, start_draft
from .config import BackendConfig
from .residence import Residence, own_device
from .rows.row_layout import exactly

NUM_WEIGHTS = 4
WEIGHT_SIZE = 256
"""Number of float32 values of each weight. All weights together have only 4 KiB, so a weight sync makes all its calls
but spends almost no time on data."""


class ScriptedBackend:
    """A `TrainBackend` without a model. It sleeps `scripted.train_row_s` seconds for each row of this rank's shard and
    `scripted.train_step_s` seconds per step.

    Every step with a token to train on adds 1 to all weights. Log-probs are zeros.
    """

    adapter: AdapterSpec | None = None
    base_record: BaseRecord | None = None
    shares_features: bool = False

    def __init__(self, config: BackendConfig, rank: int, world: int) -> None:
        """Create the weights. Raises RuntimeError when `world` > 1 and the default process group does not have `world`
        ranks."""
        if world > 1 and (not dist.is_initialized() or dist.get_world_size() != world):
            raise RuntimeError(
                f"scripted backend: it needs a default process group of {world} ranks before it is built"
            )
        self._config = config
        self._rank, self._world = rank, world
        self._writes = rank == config.topology.writer(config.topology.place(rank).dp)
        self._device = own_device()
        ramp = torch.arange(WEIGHT_SIZE, dtype=torch.float32) / WEIGHT_SIZE
        self._weights = {f"scripted.{index}.weight": ramp + index for index in range(NUM_WEIGHTS)}
        self._steps = torch.zeros((), dtype=torch.int64)
        self._counts: list[float] | None = None
        """Number of tokens and number of rows that the open step trains on; None when no step is open."""
        self._residence = Residence(self._device)
        self._checkpointer = Checkpointer(rank, world)

    # ---------------- These methods run one train step.

    def begin_step(self, temperature: float = 1.0) -> None:
        """Open a step with all counts at 0. Raises RuntimeError when a step is open or the backend is offloaded, and
        ValueError when `temperature` is not above 0."""
        self._residence.require_onloaded("begin_step")
        if self._counts is not None:
            raise RuntimeError("begin_step: a step is open; finish_step or abort_step comes first")
        if not temperature > 0:
            raise ValueError(f"temperature: got {temperature}, expected a number above 0")
        self._counts = [0.0, 0.0]

    def accumulate(self, micros: Iterable[MicroBatch], count: int) -> None:
        """Read `count` microbatches, count their tokens and rows, and sleep `scripted.train_row_s` seconds per row.

        Needs the column `response_mask`. Raises RuntimeError when no step is open.
        """
        if self._counts is None:
            raise RuntimeError("accumulate: no step is open")
        for micro in exactly(micros, count):
            ends = time.perf_counter() + self._config.scripted.train_row_s * len(micro.lengths)
            mask = micro.batch.jagged("response_mask")
            rows = torch.repeat_interleave(torch.arange(len(mask.lengths)), torch.from_numpy(mask.lengths))
            trained = torch.bincount(rows, weights=mask.values.to(torch.float64), minlength=len(mask.lengths))
            self._counts[0] += float(trained.sum())
            self._counts[1] += float((trained > 0).sum())
            time.sleep(max(0.0, ends - time.perf_counter()))

    def finish_step(self) -> dict[str, float]:
        """Close the step, sleep for `scripted.train_step_s` seconds, and add 1 to all weights. Without a token to train
        on, the weights stay as they are. Collective.

        Returns `train/tokens`, `train/sequences` (rows with a token to train on) and `train/skipped`; there is no loss
        and no gradient. Raises RuntimeError when no step is open.
        """
        if self._counts is None:
            raise RuntimeError("finish_step: no step is open")
        totals = torch.tensor(self._counts, dtype=torch.float64, device=self._device)
        self._counts = None
        if self._world > 1:
            dist.all_reduce(totals)
        time.sleep(self._config.scripted.train_step_s)
        tokens, sequences = (totals / self._config.topology.replica_size).tolist()  # The ranks of a replica share rows.
        if tokens:
            self._steps += 1
            for weight in self._weights.values():
                weight += 1.0
        return {"train/tokens": tokens, "train/sequences": sequences, "train/skipped": 0.0 if tokens else 1.0}

    def abort_step(self) -> None:
        """Drop the counts of an open step. Idempotent."""
        self._counts = None

    def logprobs(
        self, micros: Iterable[MicroBatch], count: int, *, reference: bool = False, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Return zeros at once instead of log-probs: float32, one value per token of each microbatch.

        As in every `TrainBackend`, only the replica's writer, the rank that writes columns back, gets them; other ranks
        get []. Raises RuntimeError when the backend is offloaded.
        """
        self._residence.require_onloaded("logprobs")
        columns = [
            torch.zeros(len(micro.batch.jagged("input_ids").values), dtype=torch.float32)
            for micro in exactly(micros, count)
        ]
        return columns if self._writes else []

    # ---------------- These methods read and write weights and training state.

    def weight_specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtype and shape of each weight by name. The names belong to no real model; only the scripted
        engine accepts weights with these names."""
        return {name: (weight.dtype, tuple(weight.shape)) for name, weight in self._weights.items()}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and tensor of each weight. The tensors are whole on rank 0 and empty on other ranks. Raises
        RuntimeError when the backend is offloaded."""
        self._residence.require_onloaded("weights")
        for name, weight in self._weights.items():
            yield name, weight.to(self._device) if self._rank == 0 else weight.new_empty(0)

    def weight_regions(self) -> Sequence[Sequence[Region]]:
        """Return the regions of the weights that each rank has: every rank has all."""
        whole = [region for name, weight in self._weights.items() for region in held(name, weight.shape)]
        return [whole] * self._world

    def own_weights(self) -> Callable[[str], torch.Tensor]:
        """Return the function that returns a weight by its name. Raises RuntimeError when the backend is offloaded."""
        self._residence.require_onloaded("weights")
        return self._weights.__getitem__

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write the weights and the number of steps as the checkpoint `path`. Collective.

        Without `wait` the checkpoint is written in the background (see `Checkpointer.save`). Raises RuntimeError while
        a step is open.
        """
        self._require_closed("save")
        self._residence.require_onloaded("save")
        self._checkpointer.save(path, self._state(), wait=wait)

    def wait_saved(self) -> None:
        """Wait until no checkpoint is being written. Raises the error of the last write, once."""
        self._checkpointer.wait()

    def load(self, path: str) -> None:
        """Read the weights and the number of steps from the checkpoint `path`. Collective.

        Raises RuntimeError while a step is open, and ValueError when `path` is not a checkpoint that `save` has
        written.
        """
        self._require_closed("load")
        self._residence.require_onloaded("load")
        self._checkpointer.load(path, self._state())

    def export_model(self, path: str) -> None:
        """Write the weights as `model.safetensors` into the new folder `path`. Collective. Raises ValueError when
        `path` exists, and RuntimeError when the backend is offloaded."""
        self._residence.require_onloaded("export_model")

        def write() -> None:
            start_draft(path)
            save_file(self._weights, f"{draft_of(path)}/model.safetensors")
            publish(path)

        self._checkpointer.on_first_rank(write)

    def offload(self) -> OffloadReport:
        """Behave as a backend whose weights are in host memory: until `onload`, calls that need them are refused.

        There is no device memory to give back. Idempotent. Raises RuntimeError while a step is open, and the error of
        the last write of a checkpoint.
        """
        self._require_closed("offload")
        self._checkpointer.wait()
        return self._residence.offload(())

    def onload(self) -> OffloadReport:
        """Undo `offload`. Idempotent."""
        return self._residence.onload()

    def group_holders(self) -> Sequence[object]:
        """Return the objects that refer to process groups."""
        return (self,)

    def close(self) -> None:
        """Drop an open step and wait until no checkpoint is being written. Raises the error of the last write."""
        self.abort_step()
        self._checkpointer.close()

    def _require_closed(self, call: str) -> None:
        if self._counts is not None:
            raise RuntimeError(f"{call}: a step is open; finish_step or abort_step comes first")

    def _state(self) -> dict[str, torch.Tensor]:
        return {"steps": self._steps, **self._weights}
