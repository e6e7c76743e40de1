"""Makes tensors of random bits, for tests that no bit of a row changes."""

from __future__ import annotations

import numpy as np
import torch


def random_bits(rng: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of any bit pattern that the dtype has, NaNs of all kinds among them."""
    top = 2 if dtype == torch.bool else 256
    count = int(np.prod(shape, dtype=np.int64))
    out = torch.empty(count, dtype=dtype)
    out.view(torch.uint8).copy_(torch.from_numpy(rng.integers(0, top, count * dtype.itemsize, dtype=np.uint8)))
    return out.reshape(shape)
