"""Compares the conversion of padded tensors at both ends of a GRPO step with masked copies in plain torch.

At one end an engine's right-padded tensors become packed columns (`from_padded`), which are put. At the other end a
train worker's columns become padded tensors again (`to_padded`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from ...codecs.batch import Batch
from ...codecs.jagged import from_padded, to_padded
from .contenders import check, row_digests
from .results import MASKED_COPY, OWN_PADDING, Result
from .workloads import Load

ROUNDS_PER_REPEAT = 4
"""Number of timed runs of each function per repeat of the benchmark. A run takes milliseconds."""

Padded = Mapping[str, torch.Tensor]


def measure_padding(load: Load, repeats: int) -> list[Result]:
    """Time both conversions of the workload's columns in this process, in turn with the masked copies. Raises Mismatch
    if the results differ in any bit."""
    batch = load.batch.subset(load.first)
    padded, lengths = to_padded(batch)
    runs: dict[tuple[str, str], Callable[[], object]] = {
        ("from_padded", OWN_PADDING): lambda: from_padded(load.schema, padded, lengths),
        ("from_padded", MASKED_COPY): lambda: unpad_by_mask(padded, lengths),
        ("to_padded", OWN_PADDING): lambda: to_padded(batch),
        ("to_padded", MASKED_COPY): lambda: pad_by_mask(batch),
    }
    check(row_digests(from_padded(load.schema, padded, lengths)), row_digests(batch), "from_padded")
    check(row_digests(padded), row_digests(pad_by_mask(batch)), "to_padded")
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in runs}
    for number in range(1 + ROUNDS_PER_REPEAT * repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            took = time.perf_counter() - started
            if number:  # The first round warms up.
                seconds[name].append(took)
    nbytes = load.nbytes()
    return [Result(load.spec.name, op, way, nbytes, tuple(seconds[op, way])) for op, way in runs]


def pad_by_mask(batch: Batch) -> dict[str, torch.Tensor]:
    """Return all columns as right-padded tensors by name, like `to_padded`, with one masked copy per column."""
    assert batch.lengths is not None
    lengths = torch.from_numpy(batch.lengths)
    valid = torch.arange(int(lengths.max())) < lengths[:, None]
    out = {}
    for name, field in batch.schema.items():
        values = batch.jagged(name).values
        out[name] = torch.full((*valid.shape, *field.trailing), field.pad_value, dtype=field.dtype)
        out[name][valid] = values
    return out


def unpad_by_mask(padded: Padded, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the valid tokens of right-padded tensors by name, like `from_padded`, with one masked copy per tensor."""
    width = next(iter(padded.values())).shape[1]
    valid = torch.arange(width) < lengths[:, None]
    return {name: tensor[valid] for name, tensor in padded.items()}
