"""Checks the one function that converts weights for the way to engines."""

from __future__ import annotations

import pytest
import torch

from headrace.codecs.weights import conversion
from headrace.codecs.weights.conversion import PAIRS, convert, converted, wire_dtype


def test_the_engines_dtype_is_sent_if_it_is_smaller() -> None:
    assert wire_dtype(torch.float32, torch.bfloat16) == torch.bfloat16
    assert wire_dtype(torch.bfloat16, torch.float32) == torch.bfloat16, "twice the bytes would say nothing more"
    assert wire_dtype(torch.int64, torch.bfloat16) == torch.int64


def test_values_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, -0x80000000, 0x7F7FFFFF, 0x7F800000], dtype=torch.int32)
    exact = bits.view(torch.float32)
    found = converted(exact, torch.bfloat16)
    assert found.view(torch.int16).tolist() == [0x3F80, 0x3F82, 0x3F81, -0x8000, 0x7F80, 0x7F80]
    strided = torch.randn(6, 4).t()
    assert converted(strided, torch.bfloat16).equal(strided.bfloat16())
    assert converted(exact, torch.float32) is exact


@pytest.mark.parametrize(("source", "target"), [(torch.float64, torch.bfloat16), (torch.int64, torch.float32)])
def test_an_undeclared_pair_is_refused(source: torch.dtype, target: torch.dtype) -> None:
    assert (source, target) not in PAIRS
    with pytest.raises(ValueError, match=f"got {source}, expected a dtype that can be sent as {target}"):
        convert([torch.empty(3, dtype=target)], [torch.zeros(3, dtype=source)])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
def test_bits_of_a_tensor_that_is_not_converted_stay_as_they_are(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN has many bit patterns. Torch's copy of many tensors keeps them on a CPU, but on a GPU only for integers."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (2, 64, 1024), generator=generator, dtype=torch.uint8).to(device)
    sources = [*bits.view(dtype)]
    targets = [torch.zeros_like(source) for source in sources]
    copied: list[bool] = []
    original = conversion._copy_all
    monkeypatch.setattr(
        conversion, "_copy_all", lambda to, by: copied.append(to[0].is_floating_point()) or original(to, by)
    )
    convert(targets, sources)
    assert copied == [False] and torch.stack(targets).view(torch.uint8).equal(bits)
