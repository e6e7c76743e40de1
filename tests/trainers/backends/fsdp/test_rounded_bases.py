"""Tests adapters of bases that are rounded to 8 and 4 bits: trainer and engines have the same base, bit by bit."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headrace.actors.adapters.base_digest import base_digest
from headrace.actors.adapters.peft_folder import read_adapter, write_adapter
from headrace.actors.adapters.spec import tensor_names
from headrace.dataplane.imports import MissingExtra
from headrace.tests.trainers.backends.backend_ranks import (
    ReferenceTrainer,
    assert_same_step,
    backend_config,
    gradients_of,
    logprobs_of,
    micro_batch,
    random_matrices,
    random_rows,
    run_on_ranks,
    run_step,
    weights_of,
)
from headrace.tests.trainers.backends.mesh_ranks import Case, run_case
from headrace.trainers.backends.factory import build_backend
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.lora import rounding
from headrace.trainers.backends.lora.adapted_layers import find_targets
from headrace.trainers.backends.lora.rounded_layers import restored, rounded_layers
from headrace.trainers.backends.lora.rounding import BLOCK, Rounding, restore_weight, round_weight, rounded_weight
from headrace.trainers.backends.lora_config import ROUNDED_BYTES, LoraConfig
from headrace.trainers.base_model.prepare import prepare_base
from headrace.trainers.base_model.rounded_base import write_rounded
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import ConfigError, UserError
from headrace.trainers.observe.progress import Progress

pytestmark = pytest.mark.processes  # The libraries that round look for a compiler when they are imported.
RANK = 4
KINDS: list[Rounding] = ["int8", "nf4"]
PAIRS: list[tuple[str, Rounding]] = [("tied", "int8"), ("tied", "nf4"), ("biased", "nf4"), ("moe", "int8")]
"""Models and the kinds of rounding with which they are tested."""


def lora(kind: str) -> dict[str, Any]:
    return {"rank": RANK, "lr_factor": 1.0, "base": kind}


def write(model: Path, kind: Rounding, path: Path) -> str:
    write_rounded(str(model), kind, path, Progress("test", 1, enabled=False))
    return str(path)


@pytest.fixture(scope="module")
def bases(folder: Path) -> dict[tuple[str, str], str]:
    """The folder with the rounded base of each of `PAIRS`."""
    return {(name, kind): write(folder / name, kind, folder / f"{name}-{kind}") for name, kind in PAIRS}


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, str]:
    """The folder with a random adapter of all linear layers of each model."""
    found = {}
    for name in ("tied", "biased", "moe"):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        tensors = random_matrices(model, find_targets(model, LoraConfig()), RANK)
        found[name] = str(folder / f"adapter-{name}")
        write_adapter(found[name], base=name, rank=RANK, alpha=2.0 * RANK, dropout=0.0, tensors=tensors)
    return found


def build(model: Path | str, kind: str, rounded: str | None, adapter: str | None = None, **changes: Any) -> FsdpBackend:
    given: dict[str, Any] = {"lora": lora(kind), "rounded": rounded, "adapter": adapter, "sends_adapter": True}
    backend: Any = build_backend(backend_config(str(model), **{**given, **changes}), 0, 1)
    return backend


def tensors_of(path: str | Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(Path(path).glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 64), (256, 96), (31, 50), (1, 2), (48, 32), (5, 7)])
def test_a_rounded_weight_is_its_integers_times_their_scales(kind: Rounding, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[0])
    weight = torch.randn(shape) * 0.05
    data, scale = round_weight(weight, kind)
    whole = rounded_weight(weight, kind)
    if kind == "int8":
        wanted = data.float() * scale
        assert (whole - weight).abs().max() < 0.51 * weight.abs().amax(1).max() / 127
    else:
        import bitsandbytes.functional as library

        digits = torch.stack((data.flatten() >> 4, data.flatten() & 15), 1).flatten()[: weight.numel()].long()
        code = library.get_4bit_type("nf4", device="cpu")
        wanted = (code[digits] * scale.repeat_interleave(BLOCK)[: weight.numel()]).view(shape)
        assert (whole - weight).abs().max() < 0.16 * weight.abs().max()
    assert torch.equal(whole, wanted) and not torch.equal(whole, weight)
    assert torch.equal(restore_weight(data, scale, kind, shape, torch.bfloat16), wanted.bfloat16())


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_the_base_is_that_of_the_engines(
    folder: Path, bases: dict[tuple[str, str], str], adapters: dict[str, str], name: str, kind: str
) -> None:
    """Log-probs are those of transformers on the folder with B = 0, and on the merged folder with a random B."""
    base, rows = bases[name, kind], random_rows(1, 6)
    stored, original, whole = tensors_of(base), tensors_of(folder / name), AutoModelForCausalLM.from_pretrained(base)
    backend = build(folder / name, kind, base)
    layers = rounded_layers(backend._policy.model)
    changed = {key for key, value in stored.items() if not torch.equal(value, original[key])}
    assert changed == set(layers) == {f"{target}.weight" for target in find_targets(whole, LoraConfig())}
    for key, layer in layers.items():
        assert torch.equal(restored(layer, torch.float32), stored[key])
    assert backend.adapter is not None and backend.adapter.base == base_digest(base)
    backend.export_model(str(Path(base).with_name(f"plain-{name}-{kind}")))
    assert all(torch.equal(value, stored[key]) for key, value in tensors_of(f"{folder}/plain-{name}-{kind}").items())

    trained = build(folder / name, kind, base, adapters[name])
    out = f"{folder}/out-{name}-{kind}"
    trained.export_model(out)
    for path, ours in ((base, backend), (out, trained)):
        reference = ReferenceTrainer(path)
        theirs = torch.cat([reference.row_logprobs(row, 1.0) * torch.from_numpy(row.mask) for row in rows])
        torch.testing.assert_close(logprobs_of(ours, micro_batch(rows)), theirs.detach(), rtol=0, atol=1e-4)
    assert read_adapter(f"{out}/adapter").base == str(folder / name)
    reference = logprobs_of(trained, micro_batch(rows), reference=True)
    assert torch.equal(reference, logprobs_of(backend, micro_batch(rows)))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_gradients_are_those_of_a_base_with_the_same_weights(
    folder: Path, bases: dict[tuple[str, str], str], adapters: dict[str, str], name: str, kind: str, half: bool
) -> None:
    base, micros = bases[name, kind], [micro_batch(random_rows(0, 8)), micro_batch(random_rows(1, 5))]
    plain = build(base, "model", None, adapters[name], mixed_precision=half)
    wanted = gradients_of(plain, micros)
    for recompute in ("selective", "full", "none"):
        ours = build(folder / name, kind, base, adapters[name], mixed_precision=half, recompute=recompute)
        assert ours.adapter == plain.adapter, "the digest of the base is the same"
        found = gradients_of(ours, micros)
        assert found.keys() == wanted.keys() and all(value.any() for value in found.values())
        for key, value in found.items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-5, atol=1e-5, msg=key)
    for step in range(3):
        assert_same_step(run_step(ours, [random_rows(step, 8)]), run_step(plain, [random_rows(step, 8)]))


@pytest.mark.parametrize("kind", KINDS)
def test_memory(folder: Path, bases: dict[tuple[str, str], str], kind: str) -> None:
    """A rounded weight takes its integers and scales, and no pass keeps the restored weight."""
    backend = build(folder / "tied", kind, bases["tied", kind])
    layers = rounded_layers(backend._policy.model)
    values = sum(layer.in_features * layer.out_features for layer in layers.values())
    rows = 4 * sum(layer.out_features for layer in layers.values()) if kind == "int8" else 0
    tensors = [part for layer in layers.values() for part in layer.buffers(recurse=False)]
    assert sum(part.numel() * part.element_size() for part in tensors) == ROUNDED_BYTES[kind] * values + rows
    assert not {name for name, _ in backend._policy.model.named_parameters()} & set(layers)
    resident = {part.data_ptr() for part in backend._resident()}
    assert resident >= {part.data_ptr() for part in tensors}, "they are offloaded, too"
    kept: list[torch.Size] = []
    backend.begin_step()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor.shape), tensor)[1], lambda x: x):
        backend.accumulate([micro_batch(random_rows(0, 8))], 1)
    backend.abort_step()
    # No activation of these rows has the shape of a weight.
    shapes = {(layer.out_features, layer.in_features) for layer in layers.values()}
    assert kept and not {tuple(shape) for shape in kept} & (shapes | {shape[::-1] for shape in shapes})


def test_merged_weights_are_rounded_once(
    folder: Path, bases: dict[tuple[str, str], str], adapters: dict[str, str]
) -> None:
    """The sum of base and adapter is computed in float32, also for engines in bfloat16."""
    base = bases["tied", "nf4"]
    backend = build(folder / "tied", "nf4", base, adapters["tied"], sends_adapter=False, mixed_precision=True)
    stored, given = tensors_of(base), load_file(f"{adapters['tied']}/adapter_model.safetensors")
    found = weights_of(backend)
    assert found.keys() == stored.keys()
    for name, value in found.items():
        first, second = (given.get(part) for part in tensor_names(name.removesuffix(".weight")))
        whole = stored[name] if first is None or second is None else stored[name] + 2.0 * (second @ first)
        assert torch.equal(value, whole.to(torch.bfloat16)), name


def test_several_files_in_bfloat16(folder: Path, tmp_path: Path) -> None:
    """A folder of several files is rounded file by file, and keeps its tokenizer and config."""
    model = AutoModelForCausalLM.from_pretrained(folder / "tied", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="12KB")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    base = write(tmp_path / "model", "int8", tmp_path / "rounded_base")
    assert len(list(Path(base).glob("*.safetensors"))) > 2 and Path(base, "tokenizer_config.json").is_file()
    assert {value.dtype for value in tensors_of(base).values()} == {torch.bfloat16, torch.float32}
    backend = build(tmp_path / "model", "int8", base, mixed_precision=True)
    engine = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    for name, layer in rounded_layers(backend._policy.model).items():
        assert torch.equal(layer.weight, engine.get_parameter(name)), name


def test_a_resumed_run_finds_its_base(folder: Path, tmp_path: Path) -> None:
    run, progress = cast(Any, SimpleNamespace(path=tmp_path)), Progress("test", 1, enabled=False)
    model, settings = str(folder / "tied"), LoraConfig.model_validate(lora("int8"))
    assert prepare_base(model, LoraConfig(rank=RANK), run, progress) == model
    base = prepare_base(model, settings, run, progress)
    assert base == str(tmp_path / "rounded_base") and [path.name for path in tmp_path.iterdir()] == ["rounded_base"]
    file = Path(base, "model.safetensors")
    written = file.stat().st_mtime_ns
    assert prepare_base(model, settings, run, progress) == base and file.stat().st_mtime_ns == written
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match="is not a complete safetensors file"):
        prepare_base(model, settings, run, progress)


def spoiled(base: str, path: Path, name: str | None) -> str:
    """Copy the folder `base` to `path` with one bit of the tensor `name` changed; None removes a tensor."""
    shutil.copytree(base, path)
    tensors = load_file(path / "model.safetensors")
    if name is None:
        del tensors["model.norm.weight"]
    else:
        tensors[name].view(torch.int32).flatten()[7] ^= 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def test_a_damaged_folder_is_refused(folder: Path, tmp_path: Path, bases: dict[tuple[str, str], str]) -> None:
    base, layer = bases["tied", "nf4"], "model.layers.1.mlp.up_proj.weight"
    for number, name in enumerate((layer, "model.embed_tokens.weight", "model.norm.weight")):
        with pytest.raises(ValueError, match=f"trainer.lora.base: '{name}' in .* is not the rounded weight"):
            build(folder / "tied", "nf4", spoiled(base, tmp_path / str(number), name))
    with pytest.raises(ValueError, match="has no tensor 'model.norm.weight'"):
        build(folder / "tied", "nf4", spoiled(base, tmp_path / "less", None))
    for model, kind, rounded in (("tied", "int8", base), ("biased", "nf4", base)):
        with pytest.raises(ValueError, match="is not the rounded weight|has no tensor"):
            build(folder / model, kind, rounded)


def test_checkpoints(folder: Path, tmp_path: Path, bases: dict[tuple[str, str], str], adapters: dict[str, str]) -> None:
    """A resumed run continues exactly. A checkpoint is refused with a base that is rounded otherwise."""
    backend = build(folder / "tied", "nf4", bases["tied", "nf4"], adapters["tied"])
    run_step(backend, [random_rows(0, 8)])
    backend.save(str(tmp_path / "saved"))
    wanted = run_step(backend, [random_rows(1, 8)])
    resumed = build(folder / "tied", "nf4", bases["tied", "nf4"])
    resumed.load(str(tmp_path / "saved"))
    assert run_step(resumed, [random_rows(1, 8)]) == wanted
    for kind, base in (("int8", bases["tied", "int8"]), ("model", None)):
        with pytest.raises(UserError, match="have the digest .*, expected .*, that of the base"):
            build(folder / "tied", kind, base).load(str(tmp_path / "saved"))


def test_refusals(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({"tp": 2}, {"backend": "megatron"}, {"cp": 2, "packing": "packed"}):
        words = "trainer.lora.base: got 'nf4', expected 'model', or trainer.backend='fsdp' with data parallelism alone"
        with pytest.raises(ConfigError, match=words):
            build_config({"trainer": {"lora": {"rank": 4, "base": "nf4"}, **changes}})
        with pytest.raises(ValueError, match=words):
            backend_config("model", lora=lora("nf4"), rounded="there", **changes)
    for kind, rounded in (("nf4", None), ("model", "there")):
        with pytest.raises(ValueError, match="expected the folder of a rounded base"):
            backend_config("model", lora=lora(kind), rounded=rounded)
    (tmp_path / "empty").mkdir()
    shutil.copy(folder / "tied" / "config.json", tmp_path / "empty")
    with pytest.raises(UserError, match="trainer.lora.base: got 'int8', which .* does not allow: model.path"):
        write(tmp_path / "empty", "int8", tmp_path / "out")
    rounding._library.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(MissingExtra, match=r"trainer.lora.base=nf4 needs .* pip install 'headrace\[quantized\]'"):
        write(folder / "tied", "nf4", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def on_ranks(rank: int, world: int, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    found = run_case(rank, Case(f"fsdp tied dp{world} packed", changes), folder)
    wrong = Case("fsdp tied dp2", {**changes, "rounded": f"{folder}/spoiled"})
    with pytest.raises(ValueError, match="q_proj.weight' in .* is not the rounded weight"):
        wrong.build(rank, folder)  # Every rank raises the error.
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_train_as_one(
    folder: Path, tmp_path: Path, bases: dict[tuple[str, str], str], adapters: dict[str, str], kind: str
) -> None:
    changes = {"lora": lora(kind), "adapter": adapters["tied"], "rounded": bases["tied", kind], "sends_adapter": True}
    shutil.rmtree(folder / "spoiled", ignore_errors=True)
    spoiled(bases["tied", kind], folder / "spoiled", "model.layers.0.self_attn.q_proj.weight")
    two = run_on_ranks(on_ranks, 2, tmp_path, str(folder), changes)[0]
    one = run_case(0, Case("fsdp tied packed", changes), str(folder))
    for got, wanted in zip(two["steps"], one["steps"], strict=True):
        # Processors differ in the order of their sums: gradient norms were up to 2e-5 apart on one of them.
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    for name, value in two["weights"].items():
        # AdamW divides by the root of a gradient's square, so that the last bits of tiny gradients show: one of 4096.
        torch.testing.assert_close(value, one["weights"][name], rtol=0, atol=5e-5, msg=name)
    assert len(two["weights"]) == len(one["weights"]) > 0
