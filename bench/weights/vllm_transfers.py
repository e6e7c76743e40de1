"""`BuiltinSender` is the trainer's end of vLLM 0.26's own weight transfers, used as vLLM's documentation shows."""

# pyright: reportMissingImports=false
# vLLM need not be installed where types are checked.
from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor


class BuiltinSender:
    """Sends the current values of weights that are on one GPU."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._group: Any = None

    def specs(self) -> list[tuple[str, str, list[int]]]:
        """Return the name, dtype and shape of every weight."""
        weights = self._weights.items()
        return [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in weights]

    def join(self, port: int) -> None:
        """Join the NCCL group of the trainer and the engine."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._group = trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2})

    def send(self, packed_bytes: int) -> None:
        """Send all weights with vLLM's `nccl` backend. packed_bytes: size of its buffers; 0 sends each tensor
        separately."""
        from vllm.distributed.weight_transfer import nccl_engine

        packed = {"packed": True, "packed_buffer_size_bytes": packed_bytes} if packed_bytes else {}
        transfer: Any = nccl_engine.NCCLWeightTransferEngine
        transfer.trainer_send_weights(iter(self._weights.items()), {"group": self._group, **packed})
        torch.cuda.synchronize()

    def handles(self) -> str:
        """Return handles of all weights for vLLM's `ipc` backend, pickled and base64-encoded as it requires."""
        place = str(torch.cuda.get_device_properties(next(iter(self._weights.values())).device).uuid)
        handles = [{place: reduce_tensor(one)[1]} for one in self._weights.values()]
        return base64.b64encode(pickle.dumps(handles)).decode()
