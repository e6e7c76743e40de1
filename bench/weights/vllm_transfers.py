"""A trainer's end of vLLM 0.26's own weight transfers, as vLLM's documentation has a trainer use them."""

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
    """Sends these weights, on one GPU, as they are at the time."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._group: Any = None

    def specs(self) -> list[tuple[str, str, list[int]]]:
        """(name, dtype, shape) of every weight."""
        weights = self._weights.items()
        return [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in weights]

    def join(self, port: int) -> None:
        """The NCCL group of trainer and engine."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._group = trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2})

    def send(self, packed_bytes: int) -> None:
        """By `nccl`. packed_bytes: of its buffers; 0: tensor by tensor."""
        from vllm.distributed.weight_transfer import nccl_engine

        packed = {"packed": True, "packed_buffer_size_bytes": packed_bytes} if packed_bytes else {}
        transfer: Any = nccl_engine.NCCLWeightTransferEngine
        transfer.trainer_send_weights(iter(self._weights.items()), {"group": self._group, **packed})
        torch.cuda.synchronize()

    def handles(self) -> str:
        """For `ipc`: handles of all weights, pickled as it wants them."""
        place = str(torch.cuda.get_device_properties(next(iter(self._weights.values())).device).uuid)
        handles = [{place: reduce_tensor(one)[1]} for one in self._weights.values()]
        return base64.b64encode(pickle.dumps(handles)).decode()
