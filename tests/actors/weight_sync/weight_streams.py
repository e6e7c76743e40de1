"""Streams the weights of small models as a train backend does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(50, 8, generator=generator),
        "half": torch.randn(333, generator=generator).bfloat16(),
        "strided": torch.randn(6, 10, generator=generator, requires_grad=True).t(),
        "empty": torch.zeros(0, 4),
        "count": torch.arange(7) + seed,
        "flags": torch.tensor([True, False, True]),
    }


def specs(named: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()}


class Gather:
    """A backend's `weights()`: each tensor is gone when the next is asked for; knows whether it was exhausted."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self._named = named
        self.exhausted = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._named.items():
            lent = tensor.detach().clone()
            yield name, lent
            lent.zero_()
        self.exhausted = True


def change(named: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """A few elements of some weights, other bits of zeros and NaNs among them."""
    generator = torch.Generator().manual_seed(version)
    changed = {name: tensor.detach().clone() for name, tensor in named.items()}
    half = changed["half"].view(torch.int16)
    half[torch.randint(0, len(half), (9,), generator=generator)] ^= 1
    half[version] = -0x8000 if version % 2 else 0x7FC0 + version
    if version % 3 == 0:
        changed["embed"] += 1
    return changed
