"""Checks the one rule that makes 8-bit weights: exact bytes, and what is wrong with those that do not fit."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from headrace.codecs.weights.quantization import (
    DTYPES,
    Quantization,
    Scheme,
    dequantize,
    quantize,
    read_back,
    scale_shape,
)

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


def random_weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    sizes = torch.logspace(-3, 2, rows)[:, None]
    return (sizes * torch.randn(rows, columns, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_are_near_and_can_be_read_back_exactly(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = random_weight(200, 300, dtype)
    values, scales = quantize(weight, scheme)
    assert (values.dtype, values.shape) == (DTYPES[scheme], weight.shape) and values.is_contiguous()
    assert (scales.dtype, scales.shape) == (torch.float32, scale_shape(weight.shape, scheme))
    exact = dequantize(values, scales, torch.float32)
    largest = weight.float().abs().amax() if scheme == "fp8_block" else weight.float().abs().amax(1, keepdim=True)
    step = largest / 127 / 2 if scheme == "int8" else weight.float().abs() / 16 + largest / 448 / 512
    assert ((exact - weight.float()).abs() <= 1.01 * step).all()
    for kept in (exact, dequantize(values, scales, torch.bfloat16)):
        assert read_back(kept, scales, values.dtype).view(torch.uint8).equal(values.view(torch.uint8))
    again, same = quantize(weight.clone(memory_format=torch.contiguous_format), scheme)
    assert again.view(torch.uint8).equal(values.view(torch.uint8)) and same.equal(scales)


def test_the_bytes_are_those_of_the_rule() -> None:
    weight = torch.tensor([[254.0, 1.0, 3.0, -5.0], [0.0, 0.0, 0.0, 0.0]])
    values, scales = quantize(weight, "int8")
    assert values.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]], "ties go to even numbers"
    assert scales.tolist() == [[2.0], [1.0]]
    values, scales = quantize(weight / 254 * 448, "fp8")
    assert values.float().tolist() == [[448.0, 1.75, 5.5, -9.0], [0, 0, 0, 0]] and scales.tolist() == [[1.0], [1.0]]
    blocks = quantize(torch.cat([weight.repeat(64, 32), torch.ones(1, 128)]), "fp8_block")[1]
    assert blocks.tolist() == [[(torch.tensor(254.0) / 448).item()], [(torch.tensor(1.0) / 448).item()]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_near_the_smallest_number_have_scales(scheme: Scheme) -> None:
    weight = torch.tensor([[top, -top / 2, 0.0] for top in (1e-45, 3e-43, 9e-43, 1e-40, 1.2e-38, 1e-35)])
    values, scales = quantize(weight, scheme)
    assert values.float().isfinite().all() and (scales >= torch.finfo(torch.float32).tiny).all()
    torch.testing.assert_close(dequantize(values, scales, torch.float32), weight, rtol=0.1, atol=1e-38)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_that_is_not_finite_stays_visible(scheme: Scheme, wrong: float) -> None:
    weight = random_weight(3, 4)
    weight[1, 2] = wrong
    assert not dequantize(*quantize(weight, scheme), torch.float32)[1].isfinite().any()


def test_scales_travel_after_their_weights() -> None:
    weights = {"a.weight": random_weight(130, 64), "a.bias": torch.ones(130), "b.weight": random_weight(8, 8)}
    plan = Quantization("int8", frozenset({"a.weight"}))
    specs = plan.specs({name: (one.dtype, tuple(one.shape)) for name, one in weights.items()})
    sent = dict(plan.stream(iter(weights.items())))
    assert list(sent) == list(specs) == ["a.weight", "a.weight_scale", "a.bias", "b.weight"]
    assert {name: (one.dtype, tuple(one.shape)) for name, one in sent.items()} == specs
    assert sent["b.weight"] is weights["b.weight"]
    restored = plan.restored(sent)
    assert list(restored) == list(weights)
    assert restored["a.weight"].equal(dequantize(*quantize(weights["a.weight"], "int8"), torch.float32))
    other_rank = dict(plan.stream((name, torch.empty(0)) for name in weights))
    assert list(other_rank) == list(weights), "a rank without the weights has no scales either"
    with pytest.raises(ValueError, match=r"'c.weight' is to be quantized, but the trainer has no weight of this name"):
        Quantization("int8", frozenset({"c.weight"})).specs(specs)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"a_scale": None}, "'a' came without its scales, expected 'a_scale'"),
        ({"a_scale": torch.ones(3, 1)}, r"'a_scale' is torch.float32 \(3, 1\), expected torch.float32 \(4, 1\)"),
        ({"a_scale": torch.ones(4, 1).bfloat16()}, r"'a_scale' is torch.bfloat16 \(4, 1\), expected torch.float32"),
        ({"a": torch.ones(4, 6)}, "'a' has dtype torch.float32, expected torch.float8_e4m3fn"),
    ],
)
def test_damaged_scales_are_refused_by_name(changes: dict[str, torch.Tensor | None], sentence: str) -> None:
    plan = Quantization("fp8", frozenset({"a"}))
    sent = {**dict(plan.stream([("a", random_weight(4, 6))])), **changes}
    with pytest.raises(ValueError, match=sentence):
        plan.restored({name: one for name, one in sent.items() if one is not None})
