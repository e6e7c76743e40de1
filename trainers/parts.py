"""Builds a model, an engine, a train backend and a weight sync in this process, for an algorithm of one's own.

    engine.generate -> rows -> backend.begin_step, accumulate, finish_step -> WeightSync.send -> engine.generate

`run_training` builds the same parts in processes of their own. The loop in `examples/grpo_in_one_file.py` uses these.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..actors.engines.config import ModelConfig, engine_dtype
from ..actors.engines.factory import EngineConfig, build_engine
from ..actors.engines.in_process import InProcessEngine
from ..actors.engines.protocol import CommitReport, GenerationEngine
from ..actors.rollout.config import RolloutConfig
from ..actors.train_backend import TrainBackend
from ..actors.weight_sync.config import SyncConfig
from ..actors.weight_sync.publisher import WeightPublisher
from ..actors.weight_sync.transports.factory import build_sender
from ..actors.weight_sync.transports.protocol import ReceiverConfig, ReceiverGroup, SenderConfig
from .backends.config import BackendConfig, PrevSource, TrainerConfig
from .backends.factory import build_backend
from .backends.fsdp.bitwise.conditions import bitwise_problems, check_device, check_family
from .base_model.prepare import TINY_QWEN3, make_builtin, model_config
from .cluster.worker_specs import with_packing
from .config.config import Config, WarmupConfig
from .config.load import validated
from .errors import ConfigError

_ENGINE = "engine"
_BUCKET_BYTES = 64 << 20


def make_tiny_model(folder: str | os.PathLike[str], *, steps: int = 1000, seed: int = 0) -> str:
    """Make the model `builtin:tiny-qwen3` of the quickstart in `folder`, and return the folder's path.

    It has two layers and a tokenizer of single characters, and learns from at most `steps` batches of texts to copy,
    rotate, mirror and reverse digits, each under a letter. The letter `r` asks for any of these. A folder that exists
    is left as it is.
    """
    path = Path(folder)
    if not path.exists():
        make_builtin(path, TINY_QWEN3, WarmupConfig(corpus="digit_skills", steps=steps), seed, lambda step, loss: None)
    return str(path)


def make_engine(
    model: str,
    rollout: Mapping[str, Any] | None = None,
    *,
    max_model_len: int | None = None,
    seed: int = 0,
    bitwise: bool = False,
) -> GenerationEngine:
    """Build an engine that generates with `model`, a local folder or hub id, on this process's GPU or else the CPU.

    rollout: keys of the section `rollout` that concern engines, such as `{"engine": "hf", "max_batch": 64}`.
    max_model_len: largest number of tokens of a prompt and its answer together; None: the model's own limit. seed: of
    the sampled tokens. bitwise: whether log-probs equal those of a backend that is made with it, too, bit for bit, see
    `run.bitwise`; on a CPU, torch must have one thread. Raises ConfigError for wrong keys or values, and ValueError for
    a model that cannot be loaded, or does not fit `bitwise`.
    """
    settings = validated(Config, {"rollout": dict(rollout or {})}).rollout
    device = _device()
    if bitwise:
        _expect_exact(model, settings, TrainerConfig(mixed_precision=device != "cpu"))
    return build_engine(
        EngineConfig(
            settings,
            ModelConfig(path=model),
            device=device,
            shared_gpu=device != "cpu",
            max_model_len=max_model_len,
            seed=seed,
            receiver=ReceiverConfig(_ENGINE, SyncConfig(), device),
            bitwise=bitwise,
        )
    )


def make_backend(
    model: str,
    trainer: Mapping[str, Any] | None = None,
    loss: Mapping[str, Any] | None = None,
    *,
    total_steps: int = 0,
    updates_per_step: int = 1,
    prev: PrevSource = "rollout",
    with_reference: bool = False,
    bitwise: bool = False,
) -> TrainBackend:
    """Build a train backend for `model`, a local folder or hub id, as the only rank, on this process's GPU or the CPU.

    trainer, loss: keys of these sections, such as `{"lr": 1e-4}` and `{"kind": "my_losses:weighted"}`. The other
    arguments are those of `BackendConfig`, but `bitwise` is that of `make_engine`, of whose engine the log-probs are
    then: `hf` on a CPU, `vllm` on a GPU. Raises ConfigError for wrong keys or values, and ValueError for a model that
    cannot be trained, or does not fit `bitwise`, or a mesh of several ranks.
    """
    sections = validated(Config, {"trainer": dict(trainer or {}), "loss": dict(loss or {})})
    engine = "hf" if _device() == "cpu" else "vllm"
    if bitwise:
        _expect_exact(model, RolloutConfig(engine=engine), sections.trainer)
    config = BackendConfig(
        model,
        with_packing(sections.trainer, ModelConfig(path=model), gpu=_device() != "cpu"),
        sections.loss,
        total_steps=total_steps,
        updates_per_step=updates_per_step,
        prev=prev,
        with_reference=with_reference,
        engine_dtype=engine_dtype(ModelConfig(path=model), gpu=_device() != "cpu"),
        bitwise=engine if bitwise else None,
    )
    return build_backend(config, 0, 1)


class WeightSync:
    """Sends the weights of a backend of this process to an engine of this process. A context manager."""

    def __init__(self, backend: TrainBackend, engine: GenerationEngine) -> None:
        """Prepare to send from `backend` to `engine`, which `make_engine` built."""
        self._backend, self._engine = backend, engine
        device, self._folder = _device(), ""
        kind = "ipc"
        if device != "cpu" and isinstance(engine, InProcessEngine):
            # CUDA shares memory only between processes, never within one.
            kind, self._folder = "disk", tempfile.mkdtemp(prefix="headrace-weights-")
        sync = SyncConfig()
        sender = build_sender(kind, SenderConfig(uuid.uuid4().hex[:8], sync, folder=self._folder, device=device))
        quantization = getattr(engine, "quantization", None)
        self._publisher = WeightPublisher(
            sender, sync, _BUCKET_BYTES, adapter=backend.adapter, quantization=quantization
        )

    async def send(self, version: int) -> CommitReport:
        """Send the backend's weights, and return once the engine generates with them. Running requests finish first.

        version: number of these weights, above that of the engine, else ValueError. Raises WeightTransferError if the
        weights do not arrive; the engine then keeps those that it has.
        """
        if version <= self._engine.version:
            raise ValueError(f"version: got {version}, expected more than {self._engine.version}, the engine's version")
        receivers = [ReceiverGroup(_ENGINE, self._engine.num_workers)]
        update = self._publisher.open(version, self._backend.weight_specs(), receivers)
        # The engine reads while the backend writes, at most two buckets behind.
        sending = asyncio.to_thread(self._publisher.publish, update, iter(self._backend.weights()))
        try:
            await asyncio.gather(sending, self._engine.prepare_weights(update))
        finally:
            self._publisher.abort("the engine did not take the weights")  # This does nothing after a success.
        return await self._engine.commit_weights(version)

    def close(self) -> None:
        """Remove everything that was sent. Idempotent."""
        self._publisher.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _expect_exact(model: str, rollout: RolloutConfig, trainer: TrainerConfig) -> None:
    """Raise ConfigError or ValueError if log-probs of an engine and a backend cannot be equal bit for bit."""
    gpu = _device() != "cpu"
    check_device(rollout.engine, gpu=gpu)
    made = ModelConfig(path=model, dtype=engine_dtype(ModelConfig(path=model), gpu=gpu))
    if problems := list(bitwise_problems(rollout, trainer, made, on=True, threads=1)):
        raise ConfigError(problems)
    check_family(SimpleNamespace(**model_config(ModelConfig(path=model))), rollout.engine)


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
