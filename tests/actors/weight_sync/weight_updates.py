"""Publishes versions of weights for engines under test, by a real sender in this process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.transports.factory import build_sender
from headrace.actors.weight_sync.transports.protocol import (
    BucketFrame,
    ReceiverConfig,
    ReceiverGroup,
    SenderConfig,
    WeightUpdate,
)
from headrace.codecs.weights.buckets import BucketPlan, checksum, plan_buckets, write_piece

ENGINE = "engine"
BUCKET_BYTES = 16 << 10


def receiver() -> ReceiverConfig:
    """What an engine under test is built with."""
    return ReceiverConfig(ENGINE, SyncConfig(staging="full", delta=True))


class Publisher:
    """Publishes through the `disk` transport, whose versions stay readable: an engine may come for them later."""

    def __init__(self, folder: Path, num_workers: int = 1, timeout_s: float = 10.0) -> None:
        config = SenderConfig(uuid.uuid4().hex[:8], SyncConfig(timeout_s=timeout_s), folder=str(folder))
        self._sender = build_sender("disk", config)
        self._receivers = [ReceiverGroup(ENGINE, num_workers)]

    def publish(self, version: int, named: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """The announcement of `version`, whole and readable."""
        plan = _plan(named)
        update = self._sender.begin(version, plan, self._receivers)
        for bucket, size in enumerate(plan.sizes):
            payload = self._sender.buffer(bucket, size)
            for entry in plan.in_bucket(bucket):
                write_piece(entry, named[entry.name], payload)
            self._sender.send(BucketFrame(bucket, "whole", size, checksum(payload)))
        self._sender.finish()
        return update

    def announce(self, version: int, named: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """The announcement of `version`, of which no bucket ever comes."""
        return self._sender.begin(version, _plan(named), self._receivers)

    def close(self) -> None:
        self._sender.close()


def close_updated(runner: asyncio.Runner, engine: Any, publisher: Publisher) -> None:
    """Close an engine, of which no process may live on, and the publisher of its weights."""
    runner.run(engine.close())
    assert not any(map(psutil.pid_exists, getattr(engine, "pids", ()))), "a process of the engine lives on"
    publisher.close()
    runner.close()


def _plan(named: Mapping[str, torch.Tensor]) -> BucketPlan:
    return plan_buckets({name: (t.dtype, tuple(t.shape)) for name, t in named.items()}, BUCKET_BYTES)


def scaled(folder: str, factor: float) -> dict[str, torch.Tensor]:
    """The model's parameters times `factor`, tied ones once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() * factor for name, parameter in model.named_parameters()}
