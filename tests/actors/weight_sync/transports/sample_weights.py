"""Makes oddly shaped weights for the transports' tests, and publishes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from headrace.actors.weight_sync.transports.protocol import BucketFrame, WeightSender
from headrace.codecs.weights.buckets import BucketPlan, checksum, encode_sparse, plan_buckets, write_piece

Named = dict[str, torch.Tensor]


def weights(seed: int, rows: int = 50) -> Named:
    """Odd tensors: strided, empty, a scalar, dtypes of 1, 2, 4 and 8 bytes. rows: 50 makes 3 KiB."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(rows, 8, generator=generator),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "strided": torch.randn(6, 10, generator=generator, requires_grad=True).t(),
        "empty": torch.zeros(0, 4),
        "count": torch.arange(7) + seed,
        "scalar": torch.tensor(float(seed)),
        "byte": torch.full((1,), seed % 256, dtype=torch.uint8),
        "eight": torch.randn(5, 7, generator=generator).to(torch.float8_e4m3fn),
        "eight_scale": torch.rand(5, 1, generator=generator),
        "head": torch.randn(rows, 8, generator=generator),
    }


def plan_of(named: Mapping[str, torch.Tensor], bucket_bytes: int) -> BucketPlan:
    return plan_buckets({name: (t.dtype, tuple(t.shape)) for name, t in named.items()}, bucket_bytes)


def bucket_bytes_of(plan: BucketPlan, bucket: int, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    out = torch.zeros(plan.sizes[bucket], dtype=torch.uint8)
    for entry in plan.in_bucket(bucket):
        write_piece(entry, named[entry.name], out)
    return out


def payloads(
    plan: BucketPlan, named: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor] | None
) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
    """Frame and payload of each bucket, against `base` when there is one."""
    for bucket in range(len(plan.sizes)):
        payload, encoding = bucket_bytes_of(plan, bucket, named), "whole"
        whole = checksum(payload) if len(payload) else 0
        if base is not None:
            old = bucket_bytes_of(plan, bucket, base)
            if torch.equal(payload, old):
                payload, encoding = payload[:0], "same"
            else:
                sparse = encode_sparse(payload.numpy(), old.numpy(), 1)
                if sparse is not None:
                    payload, encoding = torch.from_numpy(sparse), "sparse"
        result = 0 if encoding == "whole" else whole
        yield BucketFrame(bucket, encoding, len(payload), checksum(payload) if len(payload) else 0, result), payload


def publish(
    sender: WeightSender,
    plan: BucketPlan,
    named: Mapping[str, torch.Tensor],
    base: Mapping[str, torch.Tensor] | None = None,
    *,
    tamper: Callable[[int, torch.Tensor], None] | None = None,
    pause_s: float = 0.0,
) -> list[str]:
    """Send the open update. tamper(bucket, buffer): after the checksum was taken. Returns the encodings used."""
    used = []
    for frame, payload in payloads(plan, named, base):
        if frame.nbytes:
            buffer = sender.buffer(frame.bucket, frame.nbytes)
            buffer.copy_(payload)
            if buffer.device.type == "cuda":
                frame = replace(frame, checksum=checksum(buffer))
            if tamper is not None:
                tamper(frame.bucket, buffer)
        sender.send(frame)
        used.append(frame.encoding)
        if pause_s:
            time.sleep(pause_s)  # the gather of the next bucket
    sender.finish()
    return used


def equal(got: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> bool:
    return list(got) == list(sent) and all(
        got[name].dtype == t.dtype and got[name].shape == t.shape and torch.equal(got[name].cpu(), t.detach())
        for name, t in sent.items()
    )
