"""The digest that a GPU computes: sees every kind of accident, and is the same wherever it is computed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from headrace.codecs.gpu_digest import device_digest

SIZES = [0, 1, 7, 8, 9, 4096, 4099 * 8 - 1, 4099 * 8, 4099 * 8 + 1, 3 * 4099 * 8 + 77, 1 << 20]


def payload(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_every_changed_byte_changes_it(size: int) -> None:
    data = payload(size)
    expected = int(device_digest(data))
    assert int(device_digest(data.clone())) == expected
    for at in {0, 1, size // 2, size - 2, size - 1} if size > 2 else range(size):
        changed = data.clone()
        changed[at] ^= 1 << at % 8
        assert int(device_digest(changed)) != expected, at


def test_length_counts() -> None:
    """Zeros at the end are bytes, too."""
    digests = {int(device_digest(torch.zeros(size, dtype=torch.uint8))) for size in SIZES}
    assert len(digests) == len(SIZES)


def test_pieces_in_the_wrong_place_change_it() -> None:
    data = payload(1 << 22)
    expected = int(device_digest(data))
    for piece in (8, 64, 4096, 1 << 15, 1 << 20):
        for first, second in ((0, piece), (0, 2 * piece), (piece, (1 << 22) - piece)):
            moved = data.clone()
            moved[first : first + piece] = data[second : second + piece]
            moved[second : second + piece] = data[first : first + piece]
            assert int(device_digest(moved)) != expected, (piece, first, second)
        stale = data.clone()
        stale[-piece:] = data[:piece]
        assert int(device_digest(stale)) != expected


def test_a_view_at_any_byte_is_digested_as_its_copy() -> None:
    data = payload(100_000)
    for start in (0, 1, 3, 8, 64):
        assert int(device_digest(data[start:])) == int(device_digest(data[start:].clone()))


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_finds_the_same(size: int) -> None:
    data = payload(size)
    assert int(device_digest(data.cuda())) == int(device_digest(data))


INTERPRETED = """
import torch
from headrace.codecs import gpu_digest, gpu_digest_kernel

weights = gpu_digest._weights(torch.device("cpu"))
for size in (0, 1, 5, 4098, 4099, 4100, 32768, 32769, 100_003):
    words = torch.randint(-(2**62), 2**62, (size,), generator=torch.Generator().manual_seed(size)) * 3
    expected, found = gpu_digest._weighted_sum(words, weights), gpu_digest_kernel.weighted_sum(words, weights)
    assert int(expected) == int(found), (size, expected, found)
"""


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.codecs import gpu_digest_kernel

signature = dict(words="*i64", weights="*i64", out="*i64", num_words="i32")
sizes = dict(COLUMNS=4099, BLOCK=gpu_digest_kernel._BLOCK, STEPS=gpu_digest_kernel._STEPS)
signature |= dict.fromkeys(sizes, "constexpr")
aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(3)}
source = ASTSource(gpu_digest_kernel._weighted_sum, signature, sizes, aligned)
found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8))
assert found.asm["cubin"] and "ld.global.v2.b64" in found.asm["ptx"]
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("script", [INTERPRETED, COMPILED], ids=["sums as torch does", "compiles for Hopper"])
def test_the_kernel_without_a_gpu(script: str) -> None:
    """Triton interprets it, and compiles it; on a GPU, `device_digest` uses none that was not seen to sum rightly."""
    interpret = {"TRITON_INTERPRET": "1"} if script is INTERPRETED else {}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | interpret, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
