"""Tests training in fp8: how far products and whole models round, and that all else of a run stays as it was.

How far is derived from the format. A float with m bits after the point rounds x in [2^e, 2^(e+1)) with an error of
2^(e-m) / sqrt(12) in the root of the mean square. Relative to x, whose logarithm is taken as uniform, that is
2^-m / sqrt(12) * sqrt(3 / (8 ln 2)): 2.7 % with m = 3 (e4m3), 5.3 % with m = 2 (e5m2). The errors of the two sides of a
product are independent, and so are those of products that follow each other: their squares add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from headrace.tests.trainers.backends.backend_ranks import (
    TINY,
    assert_same_step,
    backend_config,
    gradients_of,
    logprobs_of,
    micro_batch,
    random_rows,
    run_on_ranks,
    run_step,
    weights_of,
)
from headrace.tests.trainers.backends.mesh_ranks import NUM_ROWS, Case, cases, train
from headrace.tests.trainers.backends.vision.tiny_vlms import save_vlm
from headrace.tests.trainers.families.tiny_models import save_family
from headrace.trainers.backends.fsdp import fp8_layers
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.fsdp.fp8_layers import exact, use_fp8
from headrace.trainers.losses.config import LossConfig

pytestmark = pytest.mark.processes  # torchao looks for a compiler when it is imported.
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SMOOTH = {"loss": LossConfig(kind="reinforce"), "with_reference": False}
"""Settings without a clipped ratio, whose gradient would change by a token's whole share at the bound of the clip."""
DEPTH = 2 * 4
"""Number of products that follow each other in the forward pass of two layers: of values, attention's output, and two
of the MLP."""
SLACK = 1.25
"""Factor for the largest error of 30 weights, and for values that are not spread as assumed."""


def error_of(*formats: str) -> float:
    """Return the relative error of a product whose sides are rounded to `formats`, or that of one side."""
    each = {"e4m3": 2.0**-3, "e5m2": 2.0**-2}
    return math.hypot(*(each[name] / math.sqrt(12) * math.sqrt(3 / (8 * math.log(2))) for name in formats))


def errors_of(recipe: str) -> tuple[float, float, float]:
    """Return the errors of a layer's result, of the gradient of its input, and of that of its weight."""
    gradients = "e5m2" if recipe == "tensorwise" else "e4m3"
    backward = error_of(gradients, "e4m3")
    return error_of("e4m3", "e4m3"), backward, 0.0 if recipe.endswith("gw_hp") else backward


def model_error(recipe: str) -> float:
    """Return the largest error that rounding may make in the gradient of a weight of the model `wide`."""
    forward, backward, _ = errors_of(recipe)
    return SLACK * math.sqrt(DEPTH * forward**2 + (DEPTH + 1) * backward**2)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return (torch.linalg.norm(got - wanted) / torch.linalg.norm(wanted)).item()


def worst(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert got.keys() == wanted.keys()
    return max(relative(got[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def wide(folder: Path) -> Path:
    """A folder with a model `wide`, whose sizes suffice for fp8 on two tensor-parallel ranks, too."""
    torch.manual_seed(3)
    sizes = {**TINY, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder / "wide")
    return folder


def build(folder: Path, recipe: str = "rowwise", model: str = "wide", **changes: Any) -> Any:
    return FsdpBackend(backend_config(str(folder / model), fp8=recipe, **changes), 0, 1)


class OneLayer(nn.Module):
    """A model of one linear layer, as far as `use_fp8` looks at models."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.decoder = nn.ModuleDict({"layer": nn.Linear(64, 48, dtype=dtype)})

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def get_output_embeddings(self) -> None:
        return None


def products(model: OneLayer, *given: torch.Tensor) -> list[torch.Tensor]:
    """Return the layer's result, and the gradients of its input, its weight and its bias."""
    hidden, gradient = given
    layer: Any = model.decoder["layer"]
    hidden = hidden.clone().requires_grad_()
    out = layer(hidden)
    return [out, *torch.autograd.grad(out, (hidden, layer.weight, layer.bias), gradient)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_round_as_far_as_the_format_says(recipe: str, dtype: torch.dtype) -> None:
    """A layer in fp8 is not exact by accident, either. 37 tokens are no multiple of 16."""
    torch.manual_seed(0)
    model, given = OneLayer(dtype), (torch.randn(37, 64, dtype=dtype), torch.randn(37, 48, dtype=dtype))
    plain = products(model, *given)
    layers = use_fp8(model, recipe, torch.device("cpu"), 1, trained=True)
    assert layers == [model.decoder["layer"]]
    rounded = products(model, *given)
    for got, wanted, error in zip(rounded, plain, (*errors_of(recipe), 0.0), strict=True):
        assert got.dtype == dtype and 0.85 * error <= relative(got, wanted) <= 1.15 * error + 1e-6
    with exact(layers):
        for got, wanted in zip(products(model, *given), plain, strict=True):
            assert relative(got, wanted) < (1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert all(map(torch.equal, products(model, *given), rounded)), "layers round again after `exact`"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_compute_what_is_emulated(recipe: str, device: str) -> None:
    """Kernels round results to bfloat16. Those for CPUs take any number of tokens, those for GPUs multiples of 16."""
    found = []
    for emulate in (True, False):
        torch.manual_seed(0)
        model, options = OneLayer(torch.bfloat16).to(device), {"dtype": torch.bfloat16, "device": device}
        given = torch.randn(37, 64, **options), torch.randn(37, 48, **options)  # pyright: ignore
        [layer] = use_fp8(model, recipe, torch.device(device), 1, trained=True)
        own: Any = layer
        own.linear_mm_config = type(own.linear_mm_config)(
            *(one._replace(emulate=emulate) for one in own.linear_mm_config)
        )
        found.append(products(model, *given))
    assert all(relative(got, wanted) < 2**-7 for got, wanted in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_trains_within_the_bound(wide: Path, recipe: str) -> None:
    """With compiled layers, packed rows and numbers of tokens that are no multiples of 16. What is compared is computed
    in bfloat16 by both."""
    changes: dict[str, Any] = {**SMOOTH, "mixed_precision": True, "packing": "packed", "compile": True}
    plain, backend = build(wide, "none", **changes), build(wide, recipe, **changes)
    for seed in range(3):
        micros = [micro_batch(random_rows(seed, 7)), micro_batch([]), micro_batch(random_rows(seed + 9, 5))]
        wanted = gradients_of(plain, micros)
        assert 0.01 < worst(gradients_of(backend, micros), wanted) < 1.2 * model_error(recipe)
    assert run_step(backend, [random_rows(0, 8)])["train/skipped"] == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_inputs_may_have_gaps_and_results_may_be_changed_in_place(recipe: str) -> None:
    """Mamba transposes what it gives to a layer, and Llama 4 adds to what it gets."""
    torch.manual_seed(0)
    model = OneLayer(torch.float32)
    given = torch.randn(2, 64, 5).transpose(1, 2), torch.randn(2, 48, 5).transpose(1, 2)
    use_fp8(model, recipe, torch.device("cpu"), 1, trained=True)
    dense = products(model, *(one.contiguous() for one in given))
    for got, wanted in zip(products(model, *given), dense, strict=True):  # Sums can be in another order.
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
    hidden = given[0].clone().requires_grad_()
    model.decoder["layer"](hidden).add_(1).backward(given[1])
    torch.testing.assert_close(cast(torch.Tensor, hidden.grad), dense[1], rtol=1e-5, atol=1e-4)


@contextmanager
def damaged(layer: nn.Module, factor: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context in which the scale of the weight of `layer` is wrong by `factor`."""
    import torchao.float8.float8_linear as module

    real = module.hp_tensor_to_float8_dynamic

    def scaled(tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
        found = real(tensor, *given, **options)
        if tensor.data_ptr() == layer.weight.data_ptr():  # pyright: ignore
            found._scale = found._scale * factor
        return found

    with monkeypatch.context() as patch:
        patch.setattr(module, "hp_tensor_to_float8_dynamic", scaled)
        yield


@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_float32_and_rounding(
    wide: Path, recipe: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale that is wrong by a factor of 2 in any one of the 14 layers is far beyond the bound."""
    micro = micro_batch(random_rows(seed, 8))
    wanted = gradients_of(build(wide, "none", **SMOOTH), [micro])
    backend, bound = build(wide, recipe, **SMOOTH), model_error(recipe)
    assert bound / 3 < worst(gradients_of(backend, [micro]), wanted) < bound
    assert len(backend._policy.fp8) == 14
    for layer in backend._policy.fp8:
        with damaged(layer, 2.0, monkeypatch):
            assert worst(gradients_of(backend, [micro]), wanted) > 1.7 * bound


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "changes",
    [{"packing": "packed"}, {"recompute": "full"}, {"recompute": "selective", "packing": "packed"},
     {"mixed_precision": True}],
    ids=lambda changes: "-".join(map(str, changes.values())),
)  # fmt: skip
def test_layouts_recomputation_and_half_precision_keep_the_bound(
    wide: Path, recipe: str, changes: dict[str, Any]
) -> None:
    """Recomputed values are those of the forward pass, bit by bit."""
    rows = random_rows(1, 8)
    wanted = build(wide, "none", **SMOOTH)
    backend = build(wide, recipe, **SMOOTH, **changes)
    got = gradients_of(backend, [micro_batch(rows)])
    assert worst(got, gradients_of(wanted, [micro_batch(rows)])) < model_error(recipe)
    plain = {name: value for name, value in changes.items() if name != "recompute"}
    if plain != changes:
        again = gradients_of(build(wide, recipe, **SMOOTH, **plain), [micro_batch(rows)])
        assert all(torch.equal(got[name], value) for name, value in again.items())
    mask = torch.cat([torch.from_numpy(row.mask) for row in rows]) > 0
    ours, exactly = (logprobs_of(one, micro_batch(rows))[mask] for one in (backend, wanted))
    # Log-probs differ by what the forward pass alone adds to them, relative to how much they vary.
    assert relative(ours - exactly.mean(), exactly - exactly.mean()) < SLACK * error_of("e4m3", "e4m3") * DEPTH**0.5


def test_rows_of_a_microbatch_change_log_probs_only_with_one_scale_for_all(wide: Path) -> None:
    rows = random_rows(2, 8)
    for recipe, alike in (("rowwise", True), ("tensorwise", False)):
        backend = build(wide, recipe, packing="packed")
        whole = logprobs_of(backend, micro_batch(rows))
        alone = torch.cat([logprobs_of(backend, micro_batch([row])) for row in rows])
        assert torch.allclose(alone, whole, rtol=0, atol=1e-6) is alike, recipe


def one_step(rank: int, folder: str, case: Case) -> dict[str, Any]:
    backend: Any = case.build(rank, folder)
    step = train(backend, case.topology, rank, random_rows(0, NUM_ROWS))
    return {"step": step, "weights": weights_of(backend), "layers": len(backend._policy.fp8)}


MESHES = "dp2, tp2, cp2, dp2 packed recompute offload, tp2 packed recompute, dp2 half"
ON_TWO = [Case(one.name, {"fp8": "rowwise"}) for one in cases("fsdp", wide=MESHES)]
ONCE = Case("fsdp wide tp2", {"fp8": "tensorwise"})


def on_two_ranks(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    return [one_step(rank, folder, case) for case in (*ON_TWO, ONCE)]


def test_meshes_round_alike(wide: Path) -> None:
    """The scales of `rowwise` are powers of two, so that all meshes round alike.

    Rounding then does not depend on which rows of a weight and which tokens have a scale in common. Weights that are
    sent stay those of the model: float32, and all of them."""
    ranks = run_on_ranks(on_two_ranks, 2, wide / "run", str(wide))
    backend, plain = build(wide), build(wide, "none")
    wanted, without = (run_step(one, [random_rows(0, NUM_ROWS)]) for one in (backend, plain))
    assert abs(wanted["train/grad_norm"] - without["train/grad_norm"]) > 1e-4, "fp8 does something"
    weights = weights_of(backend)
    for case, found in zip(ON_TWO, ranks[0], strict=False):
        assert found["layers"] == 14
        if "half" in case.name:
            assert found["step"]["train/grad_norm"] == pytest.approx(without["train/grad_norm"], rel=0.1)
            continue
        assert_same_step(found["step"], wanted)
        for name, value in found["weights"].items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5)  # A step is 1e-3.
    assert ranks[0][-1]["step"]["train/grad_norm"] == pytest.approx(without["train/grad_norm"], rel=0.05)
    assert ranks[0][-1]["step"] == ranks[1][-1]["step"]


def test_a_run_goes_on_and_is_exported_as_without_fp8(wide: Path, tmp_path: Path) -> None:
    """A resumed run makes the same step bit by bit, another key reads the same checkpoint, and the folder is plain."""
    backend, rows = build(wide), random_rows(3, NUM_ROWS)
    run_step(backend, [rows[:5], rows[5:]])
    backend.save(str(tmp_path / "saved"))
    backend.export_model(str(tmp_path / "model"))
    weights = weights_of(backend)
    third = run_step(backend, [rows])
    again = build(wide)
    again.load(str(tmp_path / "saved"))
    assert run_step(again, [rows]) == third
    assert all(torch.equal(value, weights_of(again)[name]) for name, value in weights_of(backend).items())
    plain = build(wide, "none")
    plain.load(str(tmp_path / "saved"))
    for one in (plain, build(tmp_path, "none", "model")):
        assert all(torch.equal(value, weights[name]) for name, value in weights_of(one).items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_microbatches_add_up_and_the_reference_model_does_not_round(wide: Path) -> None:
    backend, rows = build(wide, **SMOOTH), random_rows(1, 9)
    whole = gradients_of(backend, [micro_batch(rows)])
    parts = gradients_of(backend, [micro_batch(rows[:4]), micro_batch([]), micro_batch(rows[4:])])
    assert worst(parts, whole) < 1e-5
    for recipe in RECIPES:  # A microbatch without rows has one token.
        assert run_step(build(wide, recipe), [[]])["train/skipped"] == 1
    with_reference, plain = build(wide), build(wide, "none")
    values = [logprobs_of(one, micro_batch(rows), reference=True) for one in (with_reference, plain)]
    assert torch.equal(*values) and not torch.equal(values[0], logprobs_of(with_reference, micro_batch(rows)))
    teacher: Any = FsdpBackend(with_reference._config.frozen(str(wide / "wide"), offload=False), 0, 1)
    assert torch.equal(logprobs_of(teacher, micro_batch(rows)), values[0])


def names_of(backend: Any) -> set[str]:
    every = {id(module): name for name, module in backend._policy.model.named_modules()}
    return {every[id(layer)] for layer in backend._policy.fp8}


def test_only_trained_linear_layers_of_the_decoder_round(folder: Path, tmp_path: Path) -> None:
    """Routers, stacked experts, output layer, frozen layers, and the vision tower stay as they are."""
    attention = {f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkvo"}
    mlp = {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert names_of(build(folder, model="moe")) == attention | mlp
    frozen = build(folder, model="moe", freeze=["*.self_attn.*"])
    assert names_of(frozen) == mlp
    save_vlm(tmp_path / "qwen3_vl", "qwen3_vl")
    found = names_of(build(tmp_path, model="qwen3_vl"))
    assert len(found) == 14 and all("language_model.layers" in name for name in found)


@pytest.mark.parametrize(
    ("family", "left_out", "num"),
    [("mamba", "dt_proj", 6), ("jamba", "dt_proj", 20), ("llama4_text", "none", 28)],
)
def test_layers_that_a_model_does_not_call_do_not_count(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    left_out: str,
    num: int,
) -> None:
    """Mamba reads the weight of `dt_proj` itself. Each layer that counts rounds its weight in a step."""
    monkeypatch.setattr(fp8_layers, "MULTIPLE", 2)
    save_family(tmp_path / family, family)
    with caplog.at_level("INFO", logger=fp8_layers.__name__):
        backend = build(tmp_path, model=family, **SMOOTH)
    assert f"trainer.fp8=rowwise: {num} linear layers with" in caplog.text and caplog.text.endswith(f": {left_out}\n")
    micro = micro_batch(random_rows(1, 6))
    rounded = gradients_of(backend, [micro])
    assert all(value.isfinite().all() for value in rounded.values()) and len(backend._policy.fp8) == num
    for layer in backend._policy.fp8:
        with damaged(layer, 4.0, monkeypatch):
            assert any(not torch.equal(value, rounded[name]) for name, value in gradients_of(backend, [micro]).items())


def test_what_cannot_train_in_fp8_is_told(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=32)).save_pretrained(tmp_path / "gpt2")
    refused = {
        "'none' for GPT2LMHeadModel, whose decoder has no trained layer of torch's class": {"model": "../gpt2"},
        "with sizes that are multiples of 16": {"freeze": ["*_proj.weight"]},
        "with trainer.lora.rank=4, expected 'none', because torchao": {"lora": {"rank": 4}},
    }
    folder = tmp_path / "models"
    folder.symlink_to(wide)
    (wide.parent / "gpt2").symlink_to(tmp_path / "gpt2")
    for words, changes in refused.items():
        with pytest.raises(ValueError, match=f"^trainer.fp8: got 'rowwise'.*{words}"):
            build(wide, **changes)
    with caplog.at_level("INFO", logger=fp8_layers.__name__):
        build(wide, freeze=["*.mlp.down_proj.*"])
    assert (
        "rowwise: 12 linear layers with" in caplog.text and "which a CPU emulates; left out: down_proj" in caplog.text
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(ValueError, match="expected 'none' on a GPU of the kind NVIDIA A100, which does not compute"):
        use_fp8(OneLayer(torch.float32), "rowwise", torch.device("cuda"), 1, trained=True)
