"""Tests of digests of single weights: what a taker computes, what a comparison finds, and what a sample holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.codecs import messages
from headrace.codecs.memory import flat_bytes
from headrace.codecs.weights.gpu_scatter import device_digest
from headrace.codecs.weights.parameter_digests import (
    NUM_SAMPLED,
    DigestTaker,
    ParameterDigest,
    ParameterDigests,
    compare_digests,
    sampled_names,
)

WEIGHTS = {
    "long": torch.arange(300_000, dtype=torch.float32),  # more than one piece
    "strided": torch.arange(60).reshape(6, 10).t().bfloat16(),
    "odd": torch.arange(7, dtype=torch.uint8),
    "scalar": torch.tensor(3.0),
    "one of a wider tensor": torch.randn(4)[::2][:1],
    "empty": torch.zeros(0, 4),
}


def taken(names: list[str]) -> ParameterDigests:
    taker = DigestTaker(3, names)
    for name, tensor in WEIGHTS.items():
        taker.take(name, tensor)
    digests = taker.result()
    assert messages.decode(messages.encode(digests), ParameterDigests) == digests
    return digests


@pytest.mark.parametrize("kind", ["xxh3", "device"])
@pytest.mark.parametrize("name", [name for name, tensor in WEIGHTS.items() if tensor.numel()])
def test_a_changed_bit_is_found_and_its_weight_named(kind: str, name: str) -> None:
    digests = taken(list(WEIGHTS))
    if kind == "device":  # as of a trainer on a GPU
        flat = {name: flat_bytes(one.contiguous()) for name, one in WEIGHTS.items()}
        weights = [replace(one, kind="device", digest=int(device_digest(flat[one.name]))) for one in digests.weights]
        digests = replace(digests, weights=tuple(replace(one, digest=one.digest & (1 << 64) - 1) for one in weights))
    served = {name: tensor.clone() for name, tensor in WEIGHTS.items()}

    def compare() -> tuple[int, str]:
        return compare_digests(digests, lambda weight: [served[weight.name]], "engine 4")

    assert compare() == (len(WEIGHTS), "")
    served[name] = served[name].contiguous()
    flat_bytes(served[name])[-1] ^= 1
    count, error = compare()
    [expected] = [one for one in digests.weights if one.name == name]
    assert count == len(WEIGHTS)
    assert error.startswith(f"engine 4: weights of version 3: {name!r} has digest ") and "differ" not in error
    assert f"the trainer's is {expected.digest:016x}" in error


def test_weights_that_cannot_be_read_are_not_counted() -> None:
    digests = taken(["odd", "scalar"])
    assert [one.name for one in digests.weights] == ["odd", "scalar"]
    read = {"odd": [], "scalar": [WEIGHTS["scalar"], WEIGHTS["scalar"] + 1]}
    count, error = compare_digests(digests, lambda weight: read[weight.name], "engine 0")
    assert count == 1 and "'scalar'" in error, "each tensor of a tied weight counts"


def test_only_the_same_dtype_and_shape_fit() -> None:
    weight = ParameterDigest("w", "bfloat16", (2, 3), "xxh3", 0)
    assert weight.fits(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert not weight.fits(torch.zeros(2, 3)) and not weight.fits(torch.zeros(3, 2, dtype=torch.bfloat16))


def test_samples_differ_by_version_and_come_to_all_weights() -> None:
    names = [f"layer {index}" for index in range(50)]
    samples = [sampled_names(names, version) for version in range(40)]
    assert all(len(sample) == NUM_SAMPLED for sample in samples) and len(set(map(frozenset, samples))) > 30
    assert samples[7] == sampled_names(names, 7) and set().union(*samples) == set(names)
    assert sampled_names(names[:3], 1) == set(names[:3])
