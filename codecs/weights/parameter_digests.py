"""Computes digests of single weights, so that an engine can check that it serves the weights that the trainer sent."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import xxhash

from ..memory import flat_bytes
from .gpu_scatter import device_digest, device_digests

Kind = Literal["xxh3", "device"]
"""How a digest is computed: `xxh3` is xxh3_64 of the bytes, `device` is `gpu_scatter.device_digest`. Both work for
tensors on any device, but `xxh3` is fast only on the CPU, and `device` only on a GPU."""

_SMALL = 1 << 20
"""Largest number of bytes of a weight whose digest a GPU computes together with those of others."""
_HELD = 32 << 20
"""Number of bytes of such weights that are copied before their digests are computed."""
NUM_SAMPLED = 8
"""Number of weights in a sample."""


@dataclass(frozen=True, slots=True)
class ParameterDigest:
    """Digest of one weight of the trainer."""

    name: str
    """Name of the weight in Hugging Face format."""
    dtype: str
    """Dtype in which the weight is sent, such as `bfloat16`."""
    shape: tuple[int, ...]
    kind: Kind
    digest: int
    """Unsigned 64-bit digest of the weight's bytes."""

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` has the dtype and shape of the weight, so that its digest can be compared."""
        return tuple(tensor.shape) == self.shape and str(tensor.dtype) == f"torch.{self.dtype}"


@dataclass(frozen=True, slots=True)
class ParameterDigests:
    """Digests of some or all weights of one version."""

    version: int
    weights: tuple[ParameterDigest, ...]


class DigestTaker:
    """Computes the digests of one version, weight by weight, as the trainer gathers them."""

    def __init__(self, version: int, names: Collection[str]) -> None:
        """names: names of the weights whose digests are wanted."""
        self._version = version
        self._names = names
        self._taken: list[tuple[ParameterDigest, int | torch.Tensor]] = []
        self._held: list[tuple[ParameterDigest, torch.Tensor]] = []
        """Copies of small weights whose digests are not computed yet."""
        self._num_held = 0

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Compute the digest of a weight if it is wanted. On a GPU the work is queued on the current stream. tensor:
        the whole weight, on any device."""
        if name in self._names:
            kind: Kind = "device" if tensor.is_cuda else "xxh3"
            weight = ParameterDigest(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), kind, 0)
            if kind == "device" and tensor.nbytes <= _SMALL:
                self._held.append((weight, flat_bytes(tensor.contiguous()).clone()))
                self._num_held += tensor.nbytes
                if self._num_held >= _HELD:
                    self._let_go()
            else:
                self._taken.append((weight, _queued(tensor, kind)))

    def _let_go(self) -> None:
        if self._held:
            found = device_digests([copied for _, copied in self._held])
            self._taken += zip((weight for weight, _ in self._held), found.unbind(), strict=True)
        self._held, self._num_held = [], 0

    def result(self) -> ParameterDigests:
        """Return the digests of the weights taken, once the GPU has computed them."""
        self._let_go()
        digests = _unsigned([digest for _, digest in self._taken])
        weights = (replace(weight, digest=digest) for (weight, _), digest in zip(self._taken, digests, strict=True))
        return ParameterDigests(self._version, tuple(weights))


def sampled_names(names: Sequence[str], version: int) -> Collection[str]:
    """Return NUM_SAMPLED of `names`, or all if there are no more. The choice depends only on `names` and `version`."""
    return frozenset(random.Random(version).sample(names, min(NUM_SAMPLED, len(names))))


def compare_digests(
    expected: ParameterDigests, served: Callable[[ParameterDigest], Sequence[torch.Tensor]], engine: str
) -> tuple[int, str]:
    """Compare an engine's weights with the trainer's digests. Returns the number of weights compared, and an error text
    that names the first weight that differs; "" if none does.

    engine: the engine's name, for the text. served: function that returns the engine's tensors of a weight, each with
    the weight's dtype and shape. It returns no tensors for a weight that cannot be compared, because the engine keeps
    it in another form.
    """
    compared: list[ParameterDigest] = []
    small: list[tuple[ParameterDigest, torch.Tensor]] = []
    queued: list[int | torch.Tensor] = []
    for weight in expected.weights:
        for tensor in served(weight):
            if weight.kind == "device" and tensor.is_cuda and tensor.nbytes <= _SMALL:
                small.append((weight, flat_bytes(tensor.contiguous())))
                continue
            compared.append(weight)
            queued.append(_queued(tensor, weight.kind))
    if small:
        compared += [weight for weight, _ in small]
        queued += device_digests([flat for _, flat in small]).unbind()
    found = {
        weight.name: (weight.digest, digest)
        for weight, digest in zip(compared, _unsigned(queued), strict=True)
        if weight.digest != digest
    }
    count = len({weight.name for weight in compared})
    if not found:
        return count, ""
    name, (wanted, got) = next(iter(found.items()))
    more = f", and {len(found) - 1} more differ" if len(found) > 1 else ""
    return count, (
        f"{engine}: weights of version {expected.version}: {name!r} has digest {got:016x} after the load, the "
        f"trainer's is {wanted:016x} ({count} weights were compared{more})"
    )


def _queued(tensor: torch.Tensor, kind: Kind) -> int | torch.Tensor:
    """Return the digest of a tensor. For `device`, it is a tensor that the device may still be computing."""
    flat = flat_bytes(tensor.contiguous())
    return device_digest(flat) if kind == "device" else _xxh3(flat)


def _xxh3(flat: torch.Tensor) -> int:
    """Return xxh3_64 of the bytes without copying them on the CPU. They are not viewed by numpy, because torch would
    then never let the trainer free their storage to offload it."""
    host = flat.cpu()
    return xxhash.xxh3_64_intdigest((ctypes.c_char * len(host)).from_address(host.data_ptr()) if len(host) else b"")


def _unsigned(digests: Sequence[int | torch.Tensor]) -> list[int]:
    """Return the digests as unsigned integers, after one wait for all that a device still computes."""
    pending = [digest for digest in digests if isinstance(digest, torch.Tensor)]
    ready = iter(torch.stack(pending).tolist() if pending else ())
    return [(next(ready) if isinstance(digest, torch.Tensor) else digest) & (1 << 64) - 1 for digest in digests]
