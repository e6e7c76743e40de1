"""A bucket taken in one pass: the same bytes in the same places, and the same digest, as in two."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from headrace.codecs.weights.gpu_scatter import Scatter, check, device_digest, scatter_kernel
from headrace.tests.codecs.weights.test_gpu_digest import payload

CPU = torch.device("cpu")


def test_pieces_are_copied_and_all_is_summed() -> None:
    data = payload(1 << 16)
    targets = {0: torch.zeros(100, dtype=torch.uint8), 4096: torch.zeros(8192, dtype=torch.uint8)}
    found = Scatter(len(data), list(targets.items()), CPU, None)(data)
    assert int(found) == int(device_digest(data))
    for begin, target in targets.items():
        assert torch.equal(target, data[begin : begin + len(target)])


def test_a_payload_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="got 64 bytes, expected 128"):
        Scatter(128, [], CPU, None)(torch.zeros(64, dtype=torch.uint8))


INTERPRETED = """
import torch
from headrace.codecs.weights import gpu_scatter, gpu_scatter_kernel
from headrace.codecs.weights.gpu_scatter import device_digest

cpu = torch.device("cpu")
assert gpu_scatter.check(gpu_scatter_kernel, cpu)
data = torch.randint(0, 256, (1 << 19,), dtype=torch.uint8)
for size in (len(data), 8, 65_536 + 24):
    nowhere = gpu_scatter.Scatter(size, [], cpu, gpu_scatter_kernel)
    assert int(nowhere(data[:size])) == int(device_digest(data[:size]))
data[400_000] ^= 4
whole = torch.zeros_like(data)
everywhere = gpu_scatter.Scatter(len(data), [(0, whole)], cpu, gpu_scatter_kernel)
assert int(everywhere(data)) == int(device_digest(data)) and torch.equal(whole, data)
for pieces in ([(8, whole[:64])], [(64, whole[8:72])], [(64, whole[:60])]):
    assert gpu_scatter.Scatter(len(data), pieces, cpu, gpu_scatter_kernel)._kernel is None, "not where words can be"


class Wrong:  # reads one word too few
    SEGMENT = gpu_scatter_kernel.SEGMENT

    @staticmethod
    def scatter(words, table, *constants):
        return gpu_scatter_kernel.scatter(words, table - torch.tensor([0, 1, 0]), *constants)


assert not gpu_scatter.check(Wrong, cpu)
payloads = [torch.randint(0, 256, (size * 8,), dtype=torch.uint8) for size in (1, 3, 1024, 8191, 8192, 8193, 40_000)]
payloads += [payloads[-1][8:808], payloads[0]]
expected = [int(device_digest(one)) for one in payloads]
assert gpu_scatter._digest_together(payloads, gpu_scatter_kernel).tolist() == expected


class Misplaced:  # the digests of the payloads change places
    SEGMENT, scatter = gpu_scatter_kernel.SEGMENT, staticmethod(gpu_scatter_kernel.scatter)

    @staticmethod
    def digests(table, lengths, *constants):
        return gpu_scatter_kernel.digests(table, lengths, *constants).flip(0)


class Unplaced(Misplaced):  # every segment is taken for the first of its payload

    @staticmethod
    def digests(table, lengths, *constants):
        return gpu_scatter_kernel.digests(table * torch.tensor([1, 0, 1, 1]), lengths, *constants)


assert not gpu_scatter.check(Misplaced, cpu) and not gpu_scatter.check(Unplaced, cpu)
"""


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.codecs.weights import gpu_scatter_kernel as kernel
from headrace.codecs.weights.gpu_scatter import GOLDEN, MIX

(_, first), (_, second), _ = MIX
sizes = dict(GOLDEN=GOLDEN, FIRST=first, SECOND=second, BLOCK=kernel._BLOCK, STEPS=kernel._STEPS)


def compiled(function, arguments):
    signature = dict.fromkeys(arguments, "*i64") | dict.fromkeys(sizes, "constexpr")
    aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(len(arguments))}
    source = ASTSource(function, signature, sizes, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
    assert found.asm["cubin"]
    return found.asm["ptx"]


ptx = compiled(kernel._scatter, ("payload", "table", "out"))
assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx, "16 bytes at a time"
ptx = compiled(kernel._digests, ("table", "out"))
assert "ld.global.b64" in ptx and ("atom" in ptx or "red." in ptx)
"""


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("script", [INTERPRETED, COMPILED], ids=["does what torch does", "compiles for Hopper"])
def test_the_kernel_without_a_gpu(script: str) -> None:
    """Triton interprets it, and compiles it; on a GPU, none is used that was not seen to work there."""
    interpret = {"TRITON_INTERPRET": "1"} if script is INTERPRETED else {}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | interpret, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    kernel = scatter_kernel(device)
    assert kernel is not None and check(kernel, device)
    data = payload((1 << 20) + 64 * 3).to(device)
    targets = {
        64: torch.zeros(1 << 19, dtype=torch.uint8, device=device),
        (1 << 19) + 128: torch.zeros(64, dtype=torch.uint8, device=device),
    }
    scatter = Scatter(len(data), list(targets.items()), device, kernel)
    for seed in range(3):
        data.add_(seed)
        assert int(scatter(data)) == int(device_digest(data))
        for begin, target in targets.items():
            assert torch.equal(target, data[begin : begin + len(target)])
