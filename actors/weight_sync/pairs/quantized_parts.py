"""`QuantizedParts` lets each train rank quantize its own rows of the weights, so that they are never gathered.

A scale belongs to a row, so a rank must have whole rows. What it sends are the bytes that it would send if the weight
were gathered and quantized as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ....codecs.weights.conversion import converted
from ....codecs.weights.quantization import SUFFIX, Quantization, quantize
from ..plan.regions import Region, Specs


class QuantizedParts:
    """The specs and regions of weights that ranks send in 8 bits, and how a rank reads its part."""

    def __init__(self, quantization: Quantization, specs: Specs, regions: Sequence[Sequence[Region]]) -> None:
        """specs, regions: those of the weights before they are quantized. Raises ValueError that names the first weight
        of which a rank has parts of rows."""
        self._quantization, self._dtypes = quantization, {name: dtype for name, (dtype, _) in specs.items()}
        self.specs = quantization.specs(specs)
        self.regions = [[one for region in some for one in self._sent(region, specs)] for some in regions]
        self._weights = {
            region.tensor: (region.weight, specs[region.weight][1][-1])
            for some in regions
            for region in some
            if region.weight in quantization.names
        }
        """A weight of each local tensor that is quantized, and the number of its columns."""

    def _sent(self, region: Region, specs: Specs) -> Iterator[Region]:
        yield region
        if region.weight not in self._quantization.names:
            return
        columns = specs[region.weight][1][-1]
        if region.box[-1] != (0, columns) or region.strides[-2:] != (columns, 1) or region.offset % columns:
            raise ValueError(
                f"sync.transport: got 'pairs' with rollout.quantization={self._quantization.scheme}, expected another "
                f"one, because a train rank has parts of the rows of {region.weight!r}"
            )
        strides = (*(stride // columns for stride in region.strides[:-1]), 1)
        box, tensor = (*region.box[:-1], (0, 1)), region.tensor + SUFFIX
        yield Region(region.weight + SUFFIX, box, tensor, region.offset // columns, strides)

    def reading(self, read: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
        """Return the function that returns a local tensor, or the scales of one, as it is sent. read: function that
        returns it before it is quantized. The scales are kept, and the 8-bit values of the last tensor."""
        scales: dict[str, torch.Tensor] = {}
        last: dict[str, torch.Tensor] = {}

        def sent(name: str) -> torch.Tensor:
            base = name.removesuffix(SUFFIX)
            if base not in self._weights:
                return read(name)
            if name == base and name not in last or name != base and base not in scales:
                weight, columns = self._weights[base]
                rows = converted(read(base), self._dtypes[weight]).reshape(-1, columns)
                last.clear()
                last[base], scales[base] = quantize(rows, self._quantization.scheme)
            return last[base] if name == base else scales[base]

        return sent
