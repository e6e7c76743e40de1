"""8-bit weights are read back from layers in every declared form, and a layer in another form is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.actors.engines.vllm.quantized.served_layers import ServedLayers
from headrace.codecs.weights.parameter_digests import DigestTaker, ParameterDigest, ParameterDigests, compare_digests
from headrace.codecs.weights.quantization import SUFFIX, Quantization, Scheme, dequantize

SHAPES = {"q_proj": (256, 128), "k_proj": (128, 128), "v_proj": (128, 128), "o_proj": (128, 256)}
NAMES = {f"layer.{name}.weight": shape for name, shape in SHAPES.items()}


class Method:
    """A kernel's method: the product with the weight that the layer hides."""

    def apply(self, layer: Any, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.float() @ dequantize(layer.hidden, layer.weight_scale, torch.float32).t()).to(inputs.dtype)


class Layer(torch.nn.Module):
    """A fused layer of vLLM after its kernel has changed the form of its weight."""

    def __init__(self, parts: list[tuple[torch.Tensor, torch.Tensor]], form: str) -> None:
        super().__init__()
        values, scales = (torch.cat(some) for some in zip(*parts, strict=True))
        self.logical_widths = [len(one) for one, _ in parts]
        self.input_size_per_partition = values.shape[1]
        self.params_dtype, self.quant_method = torch.bfloat16, Method()
        self.weight_scale, self.hidden = scales, values
        padded = torch.zeros(len(values) + 16, values.shape[1] + 16, dtype=values.dtype)
        padded[:-16, :-16] = values
        forms = {"plain": values, "transposed": values.t(), "padded": padded.t(), "hidden": None}
        self.weight: torch.Tensor | None = forms.get(form, values.flip(0))
        if form == "other":
            self.hidden = values.flip(0)


def served(form: str, scheme: Scheme) -> tuple[Any, ServedLayers, ParameterDigests]:
    plan, generator = Quantization(scheme, frozenset(NAMES)), torch.Generator().manual_seed(0)
    sent = dict(plan.stream((name, torch.randn(shape, generator=generator)) for name, shape in NAMES.items()))
    taker = DigestTaker(0, plan.tensors)
    for name, tensor in sent.items():
        taker.take(name, tensor)
    parts = {name: (sent[f"layer.{name}.weight"], sent[f"layer.{name}.weight{SUFFIX}"]) for name in SHAPES}
    model: Any = torch.nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.layer = torch.nn.Module()
    model.layer.qkv_proj = Layer([parts[name] for name in ("q_proj", "k_proj", "v_proj")], form)
    model.layer.o_proj = Layer([parts["o_proj"]], "plain")
    return model, ServedLayers(model, plan, NAMES.__getitem__), taker.result()


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8_block"])
@pytest.mark.parametrize(
    ("form", "way"),
    [("plain", "as sent"), ("transposed", "transposed"), ("padded", "transposed"), ("hidden", "by the kernel")],
)
def test_every_declared_form_is_found_and_read(form: str, way: str, scheme: Scheme) -> None:
    model, layers, digests = served(form, scheme)
    layers.find_readers(digests, "1.0", every=True)
    assert layers.ways == {way, "as sent"}
    read = layers.reader()
    for weight in digests.weights:
        assert [(tuple(one.shape), str(one.dtype)) for one in read(weight)] == [(weight.shape, f"torch.{weight.dtype}")]
    assert read(ParameterDigest("layer.norm.weight", "float32", (4,), "xxh3", 0)) == []
    model.layer.qkv_proj.hidden[300, 5] = 9
    if form == "hidden":
        assert "'layer.k_proj.weight' has digest" in compare_digests(digests, layers.reader(), "engine")[1]


def test_a_layer_in_another_form_is_refused_by_name() -> None:
    _, layers, digests = served("other", "int8")
    with pytest.raises(ValueError, match=r"vLLM 1.0 keeps the weight of 'layer.qkv_proj' in a form that cannot be"):
        layers.find_readers(digests, "1.0", every=True)
    model, _, digests = served("plain", "int8")
    del model.layer.o_proj
    layers = ServedLayers(model, Quantization("int8", frozenset(NAMES)), NAMES.__getitem__)
    with pytest.raises(ValueError, match=r"vLLM 1.0 has no 8-bit layer for 'layer.o_proj.weight'"):
        layers.find_readers(digests, "1.0", every=True)
    layers.find_readers(digests, "1.0", every=False)
