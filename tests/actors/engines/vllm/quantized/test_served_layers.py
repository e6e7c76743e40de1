"""8-bit weights are read back from layers in every declared form, and a layer in another form is refused by name."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch

from headrace.actors.engines.hf.stored_names import StoredTensor
from headrace.actors.engines.vllm.quantized.served_layers import ServedLayers
from headrace.actors.engines.vllm.quantized.served_parts import ServedParts
from headrace.codecs.weights.parameter_digests import DigestTaker, ParameterDigest, ParameterDigests, compare_digests
from headrace.codecs.weights.quantization import SUFFIX, Quantization, Scheme, dequantize

EXPERTS = 4
SHAPES: dict[str, tuple[int, ...]] = {
    "layer.q_proj.weight": (512, 256), "layer.k_proj.weight": (128, 256), "layer.v_proj.weight": (128, 256),
    "layer.o_proj.weight": (256, 512),
    "layer.experts.gate_up_proj": (EXPERTS, 512, 256), "layer.experts.down_proj": (EXPERTS, 256, 256),
}  # fmt: skip
STORED = {name: StoredTensor(((name,),)) for name in SHAPES}
for own, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
    files = tuple(tuple(f"layer.experts.{expert}.{part}.weight" for part in parts) for expert in range(EXPERTS))
    STORED[f"layer.experts.{own}"] = StoredTensor(files, stacked=True)
QKV = ("q_proj", "k_proj", "v_proj")


class Method:
    """A kernel's method: the product with the weight that the layer hides. It may be a view of the layer's own."""

    def apply(self, layer: Any, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.float() @ dequantize(layer.hidden, layer.weight_scale, torch.float32).t()).to(inputs.dtype)


class Layer(torch.nn.Module):
    """A fused layer of vLLM after its kernel has changed the form of its weight."""

    def __init__(self, parts: list[tuple[torch.Tensor, torch.Tensor]], form: str, rank: int, size: int) -> None:
        super().__init__()
        values, scales = (torch.cat(some) for some in zip(*parts, strict=True))
        self.logical_widths, self.tp_rank, self.tp_size = [len(one) for one, _ in parts], rank, size
        self.input_size_per_partition = values.shape[1]
        self.params_dtype, self.quant_method = torch.bfloat16, Method()
        padded = torch.zeros(len(values) + 16, values.shape[1] + 16, dtype=values.dtype)
        padded[:-16, :-16] = values
        forms = {"plain": values, "transposed": values.t(), "padded": padded.t(), "hidden": None}
        weight = forms.get(form, values.clone() if form == "copied" else values.flip(0))
        self.weight = None if weight is None else torch.nn.Parameter(weight, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        self.hidden = {"padded": padded[:-16, :-16], "other": values.flip(0)}.get(form, values)


class Experts(torch.nn.Module):
    """The experts of a layer of vLLM, in tensor or expert parallelism."""

    def __init__(self, weights: dict[str, torch.Tensor], rank: int, size: int, *, ep: bool) -> None:
        super().__init__()
        ranks = {"tp_rank": 0, "tp_size": 1, "ep_rank": rank, "ep_size": size, "use_ep": True}
        ranks = ranks if ep else {"tp_rank": rank, "tp_size": size, "ep_rank": 0, "ep_size": 1, "use_ep": False}
        self.moe_config = types.SimpleNamespace(moe_parallel_config=types.SimpleNamespace(**ranks))
        for attribute, own in (("w13_weight", "gate_up_proj"), ("w2_weight", "down_proj")):
            for end in ("", SUFFIX):
                tensor = weights[f"layer.experts.{own}{end}"]
                if ep:
                    tensor = tensor.chunk(size)[rank]
                elif own == "gate_up_proj":
                    tensor = torch.cat([half.chunk(size, 1)[rank] for half in tensor.chunk(2, 1)], 1)
                elif tensor.shape[2] > 1:
                    tensor = tensor.chunk(size, 2)[rank]
                setattr(self, attribute + end, tensor)


def cut(tensor: torch.Tensor, axis: int, rank: int, size: int) -> torch.Tensor:
    return tensor.chunk(size, axis)[rank % size] if tensor.shape[axis] > 1 else tensor


def weights_of(scheme: Scheme, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    plan = Quantization(scheme, frozenset(SHAPES))
    return dict(plan.stream((name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()))


def digests_of(tensors: Any, names: Any) -> ParameterDigests:
    taker = DigestTaker(0, frozenset(names))
    for name, tensor in tensors:
        taker.take(name, tensor)
    return taker.result()


def model_of(sent: dict[str, torch.Tensor], form: str, rank: int = 0, size: int = 1, *, ep: bool = False) -> Any:
    """A worker's model with these weights."""
    model: Any = torch.nn.Module()
    model.packed_modules_mapping = {"qkv_proj": [*QKV]}
    model.layer = torch.nn.Module()
    of = {name: [sent[f"layer.{name}.weight{end}"] for end in ("", SUFFIX)] for name in (*QKV, "o_proj")}
    shared = {name: [cut(one, 0, rank, size if name == "q_proj" else 1) for one in of[name]] for name in QKV}
    model.layer.qkv_proj = Layer([(shared[name][0], shared[name][1]) for name in QKV], form, rank, size)
    model.layer.o_proj = Layer([(cut(of["o_proj"][0], 1, rank, size), cut(of["o_proj"][1], 1, rank, size))], "plain",
                               rank, size)  # fmt: skip
    model.layer.experts = torch.nn.Module()
    model.layer.experts.routed_experts = Experts(sent, rank, size, ep=ep)
    return model


def served(model: Any, scheme: Scheme, sent: dict[str, torch.Tensor]) -> ServedLayers:
    """The layers of a model, whose readers are found with the tensors of the model's files."""
    layers = ServedLayers(ServedParts(model, STORED, SHAPES, scheme), Quantization(scheme, frozenset(SHAPES)))
    files = {}
    for name, tensor in STORED.items():
        for end in ("", SUFFIX):
            files |= {file + end: view for file, view in tensor.views(sent[name + end])}
    own = ((file, layers.part(file, tensor)) for file, tensor in files.items())
    layers.find_readers(digests_of(((file, part) for file, part in own if part is not None), files), "1.0")
    return layers


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8_block"])
@pytest.mark.parametrize(
    ("form", "way"),
    [("plain", "as sent"), ("transposed", "transposed"), ("padded", "transposed"), ("hidden", "by the kernel")],
)
def test_every_declared_form_is_found_and_read(form: str, way: str, scheme: Scheme) -> None:
    sent = weights_of(scheme)
    model = model_of(sent, form)
    layers, digests = served(model, scheme, sent), digests_of(sent.items(), sent)
    assert layers.ways == {way, "as sent"}
    kept = 2 if form == "hidden" else 1
    assert len(layers.memory()) == 2 * (3 - kept) and "layerwise (as sent)" in str(layers), "experts are not tried"
    read = layers.reader()
    for weight in digests.weights:
        assert [(tuple(one.shape), str(one.dtype)) for one in read(weight)] == [(weight.shape, f"torch.{weight.dtype}")]
    assert read(ParameterDigest("layer.norm.weight", "float32", (4,), "xxh3", 0)) == []
    assert compare_digests(layers.in_parts(digests), layers.reader(), "") == (len(sent), "")
    model.layer.experts.routed_experts.w2_weight.view(torch.int8)[2, 3, 5] ^= 1
    assert "'layer.experts.down_proj' has digest" in compare_digests(digests, layers.reader(), "engine")[1]
    model.layer.qkv_proj.hidden[600, 5] = 9
    if form == "hidden":
        assert "'layer.v_proj.weight' has digest" not in compare_digests(digests, layers.reader(), "engine")[1]
        assert "'layer.k_proj.weight' has digest" in compare_digests(digests, layers.reader(), "engine")[1]


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8_block"])
@pytest.mark.parametrize(("form", "written"), [("transposed", True), ("padded", True), ("copied", False)])
def test_only_memory_with_which_a_kernel_computes_is_written(form: str, written: bool, scheme: Scheme) -> None:
    """A layer whose kernel has a copy reads back as it should, but new bytes would not reach the kernel."""
    sent, later = weights_of(scheme), weights_of(scheme, 1)
    model = model_of(sent, form)
    layers, layer = served(model, scheme, sent), model.layer.qkv_proj
    counts = "1 in place (as sent), 1 in place (transposed), 2 layerwise (as sent)"
    assert str(layers) == f"8-bit layers: {counts if written else '1 in place (as sent), 3 layerwise (as sent)'}"
    mine = [(name, tensor) for module, name, tensor in layers.memory() if module is layer]
    assert [name for name, _ in mine] == ["weight", "weight_scale"] * written
    before, kernels = layer.quant_method.apply(layer, torch.ones(1, 256)), dict(layer._parameters)
    with layers.lent(lambda module, name, memory: torch.nn.Parameter(memory, requires_grad=False)):
        for name, _ in mine:
            layer._parameters[name].copy_(torch.cat([later[f"layer.{part}.{name}"] for part in QKV]))
    assert all(layer._parameters[name] is one for name, one in kernels.items())
    assert torch.equal(before, layer.quant_method.apply(layer, torch.ones(1, 256))) != written
    names = [f"layer.{part}.{name}" for part in QKV for name, _ in mine]
    digests = digests_of(((name, later[name]) for name in names), names)
    assert compare_digests(digests, layers.reader(), "") == (6 * written, "")


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "fp8_block"])
def test_parts_of_workers_are_compared_with_the_wholes_that_arrived(scheme: Scheme, ep: bool) -> None:
    sent, later = weights_of(scheme), weights_of(scheme, 1)
    digests, wrong = (digests_of(some.items(), some) for some in (later, sent))
    for rank in range(2):
        layers = served(model_of(sent, "plain", rank, 2, ep=ep), scheme, sent)
        model = model_of(later, "plain", rank, 2, ep=ep)
        layers = served(model, scheme, later)
        count, error = compare_digests(layers.in_parts(digests), layers.reader(), "")
        assert error == "" and 0 < count < len(sent), "no digest of a whole one was taken"
        layers.begin()
        layers.arrive(later.items())
        assert compare_digests(layers.in_parts(digests), layers.reader(), "") == (len(sent), "")
        assert compare_digests(layers.in_parts(wrong), layers.reader(), "")[1], "others have arrived than were sent"
        model.layer.o_proj.weight.view(torch.int8)[1, 2] ^= 1
        assert "'layer.o_proj.weight' has" in compare_digests(layers.in_parts(digests), layers.reader(), "")[1]


def test_a_layer_in_another_form_is_refused_by_name() -> None:
    sent = weights_of("int8")
    with pytest.raises(ValueError, match=r"vLLM 1.0 keeps the weight of 'layer.qkv_proj' in a form that cannot be"):
        served(model_of(sent, "other"), "int8", sent)
    model = model_of(sent, "plain")
    model.layer.experts.routed_experts.w13_weight = sent["layer.experts.gate_up_proj"].flip(0)
    with pytest.raises(ValueError, match=r"keeps the weight of 'layer.experts.routed_experts' in a form that cannot"):
        served(model, "int8", sent)
    model = model_of(sent, "plain")
    del model.layer.o_proj
    with pytest.raises(ValueError, match=r"vLLM 1.0 has no 8-bit layer for 'layer.o_proj.weight'"):
        served(model, "int8", sent)
    model = model_of(sent, "plain")
    model.layer.gate = copy.copy(model.layer.o_proj)
    with pytest.raises(ValueError, match=r"vLLM 1.0 has 'layer.gate' in 8 bits, which the trainer does not send so"):
        served(model, "int8", sent)
