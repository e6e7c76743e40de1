"""Tests that each family of models is in Megatron what it is in transformers: log-probs, gradients, routes, exports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.actors.engines.config import RouterReplayConfig
from headrace.tests.trainers.backends.backend_ranks import (
    ReferenceTrainer,
    backend_config,
    gradients_of,
    micro_batch,
    random_rows,
    run_on_ranks,
    run_step,
    weights_of,
)
from headrace.tests.trainers.backends.experts.balance_reference import BalanceReference
from headrace.tests.trainers.backends.experts.routed_rows import (
    Reference,
    random_routes,
    routed,
    spec_of,
    with_own_logprobs,
)
from headrace.tests.trainers.backends.families import FAMILIES, LATENT_YARN, LLAMA3, MEGATRON, SIZES, save_megatron
from headrace.tests.trainers.backends.mesh_ranks import (
    Case,
    assert_as_reference,
    cases,
    resumed,
    run_cases,
    run_reference,
)

pytestmark = pytest.mark.megatron

SHORT = ("qwen2", "mixtral", "shared", "latent")
"""Models of `make test`."""
each_model = pytest.mark.parametrize(
    "model", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in MEGATRON]
)
ROUTED = [name for name in MEGATRON if name not in ("qwen2", "mistral")]
WHOLE = "dp2 ep2, tp2 ep2 sp, cp2, pp2 recompute"
"""Meshes of models whose experts cannot be split."""
MESHES = cases(
    "megatron",
    qwen2="tp2, tp2 sp, cp2",
    mistral="tp2 sp, cp2, pp2 recompute",
    **{name: WHOLE if name == "sinks" else f"tp2 sp, {WHOLE}" for name in ROUTED},
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a model of MEGATRON once and returns its folder."""
    folder = tmp_path_factory.mktemp("families")

    def save(name: str) -> str:
        path = folder / name
        if not path.exists():
            save_megatron(path)
        return str(path)

    return save


def build(folder: str, **changes: Any) -> contextlib.closing[Any]:
    path = Path(folder)
    return contextlib.closing(Case(f"megatron {path.name}", changes).build(0, path.parent))


def hf_gradients(backend: Any, micros: list[Any]) -> dict[str, torch.Tensor]:
    """Return the gradients of a step by HF name, cut out of Megatron's parameters as weights are for an export."""
    from headrace.trainers.backends.megatron.weights import boxes, entries_of

    config, found = backend._source.config, gradients_of(backend, micros)
    parts: dict[str, torch.Tensor] = {}
    for entry in entries_of(list(found), 0, config):
        pieces = list(boxes(entry, found[entry.name], config, backend._mesh.part))
        parts |= dict(zip(entry.hf_names, pieces, strict=True))
    return parts


@each_model
def test_log_probs_gradients_and_exports_are_those_of_transformers(saved: Any, tmp_path: Path, model: str) -> None:
    folder, rows = saved(model), random_rows(1, 10)
    reference = ReferenceTrainer(folder)
    wanted = torch.cat([reference.row_logprobs(row, 1.0).detach() for row in rows])
    assert wanted.std() > 0.5
    reference.loss_sum(rows)[0].backward()
    with build(folder) as backend:
        [found] = backend.logprobs([micro_batch(rows)], 1)
        chosen = torch.from_numpy(np.concatenate([row.mask for row in rows]) > 0)
        torch.testing.assert_close(found[chosen], wanted[chosen], rtol=0, atol=1e-5)
        got = hf_gradients(backend, [micro_batch(rows[:6]), micro_batch(rows[6:])])
        backend.export_model(str(tmp_path / "out"))
    gradients = {name: param.grad for name, param in reference.model.named_parameters()}
    assert set(got) == set(gradients)
    for name, grad in gradients.items():
        assert grad is not None and grad.abs().max() > 0, name
        norm = torch.linalg.norm(grad)
        assert torch.linalg.norm(got[name].view(grad.shape) - grad) <= 1e-4 * norm, name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    before = reference.model.state_dict()
    assert list(again) == list(before)
    assert all(torch.equal(again[name], value) for name, value in before.items())


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_each_mesh_does_as_one_model(tmp_path: Path) -> None:
    for name in MEGATRON:
        save_megatron(tmp_path / name)
    for case, ranks in outcomes(tmp_path):
        assert_as_reference(case, ranks, run_reference(str(tmp_path / case.model)), spread=True)


RESUMED = cases("megatron", latent="tp2 ep2 sp, pp2, dp2 ep2", sinks="tp2 ep2 sp, pp2")
SAVED_BY = {model: (f"megatron {model} tp2 ep2 sp",) for model in ("latent", "sinks")}


def resume(rank: int, world: int, folder: str) -> dict[str, dict[str, Any]]:
    """Return the third step of each mesh from the checkpoint of one mesh, and of that mesh itself."""
    return resumed(rank, folder, RESUMED, SAVED_BY)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_a_checkpoint_goes_on_on_any_mesh(tmp_path: Path) -> None:
    for model in SAVED_BY:
        save_megatron(tmp_path / model)
    for rank in run_on_ranks(resume, 2, tmp_path / "run", str(tmp_path)):
        for case in RESUMED:
            found = rank[SAVED_BY[case.model][0]]
            assert found[case.name] == pytest.approx(found["third"], rel=1e-4, abs=1e-6), case.name


MOE: dict[str, Any] = {"moe": {"bias_update_rate": 0.05, "aux_loss_coef": 0.3}}
BALANCED = cases("megatron", MOE, latent="tp2 ep2 sp recompute, pp2, cp2, dp2 ep2")


@pytest.mark.slow
@pytest.mark.processes
def test_each_mesh_moves_the_biases_of_experts_alike(tmp_path: Path) -> None:
    save_megatron(tmp_path / "latent")
    expected = run_cases(0, 1, [Case("megatron latent", MOE)], str(tmp_path))["megatron latent"]
    ranks = run_on_ranks(run_cases, 2, tmp_path / "run", BALANCED, str(tmp_path))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    moved = (expected["weights"][name] - expected["weights before"][name]).abs()
    assert moved.min() > 0.04, "three steps of 0.05, up or down"
    for case in BALANCED:
        found = ranks[0][case.name]
        torch.testing.assert_close(found["weights"][name], expected["weights"][name], rtol=0, atol=1e-6)
        for got, wanted in zip(found["steps"], expected["steps"], strict=True):
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6), case.name


def outcomes(folder: Path) -> Iterator[tuple[Case, list[dict[str, Any]]]]:
    """Run all meshes in one start of two processes, and yield each case with what its ranks return."""
    ranks = run_on_ranks(run_cases, 2, folder / "run", MESHES, str(folder))
    for case in MESHES:
        yield case, [rank[case.name] for rank in ranks]


REPLAY = RouterReplayConfig(enabled=True, verify="forward", native_agreement_every=0)


@pytest.mark.parametrize(
    "model", [name if name == "latent" else pytest.param(name, marks=pytest.mark.slow) for name in ROUTED]
)
def test_routes_are_replayed(saved: Any, model: str) -> None:
    """Own routes give the log-probs of no replay. Others give, where `fsdp` knows the router, the same there."""
    folder, rows = saved(model), random_rows(6, 6)
    spec = spec_of(folder)
    own_rows, own = with_own_logprobs(rows, Reference(folder))
    others = random_routes(rows, spec)
    with build(folder, router_replay=REPLAY) as backend:
        [same] = backend.logprobs([routed(rows, own, spec)], 1, temperature=1.3)
        wanted = np.concatenate([row.columns["prev_logprobs"] for row in own_rows])
        torch.testing.assert_close(same, torch.from_numpy(wanted), rtol=0, atol=1e-5)
        [found] = backend.logprobs([routed(rows, others, spec)], 1)
        assert (found - same).abs().max() > 1e-2
        step = run_routed(backend, rows, others, spec)
    if model in ("mixtral", "sinks"):
        return
    with contextlib.closing(
        Case(f"fsdp {Path(folder).name}", {"router_replay": REPLAY}).build(0, Path(folder).parent)
    ) as fsdp:
        torch.testing.assert_close(found, fsdp.logprobs([routed(rows, others, spec)], 1)[0], rtol=0, atol=1e-5)
        assert step == pytest.approx(run_routed(fsdp, rows, others, spec), rel=1e-4)


def run_routed(backend: Any, rows: Any, routes: Any, spec: Any) -> list[float]:
    """Run a step with `routes`, and return its loss and the norm of its gradient."""
    backend.begin_step(1.3)
    backend.accumulate([routed(rows[:3], routes[:3], spec), routed(rows[3:], routes[3:], spec)], 2)
    step = backend.finish_step()
    return [step["train/loss"], step["train/grad_norm"]]


def test_biases_of_experts_move_as_the_formula_says(saved: Any, tmp_path: Path) -> None:
    folder, rows, name = saved("latent"), random_rows(4, 9), "model.layers.1.mlp.gate.e_score_correction_bias"
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()[name]
    [load] = BalanceReference(folder, sigmoid=True).loads(rows)
    wanted = before + 0.05 * torch.from_numpy(np.sign(load.mean() - load)).float()
    micro = micro_batch(rows)
    with build(folder, moe={"bias_update_rate": 0.05}, lr=1e-9, recompute="full") as backend:
        [first] = backend.logprobs([micro], 1, reference=True)
        step = run_step(backend, [rows[:4], rows[4:]])
        moved = weights_of(backend)[name]
        torch.testing.assert_close(moved, wanted, rtol=0, atol=1e-6)
        assert step["moe/bias_max"] == pytest.approx(float(wanted.abs().max()), rel=1e-5)
        assert torch.equal(backend.logprobs([micro], 1, reference=True)[0], first), "the reference keeps its biases"
        assert (backend.logprobs([micro], 1)[0] - first).abs().max() > 1e-2
        backend.save(str(tmp_path / "saved"))
    with build(folder) as backend:
        backend.load(str(tmp_path / "saved"))
        run_step(backend, [rows])
        assert torch.equal(weights_of(backend)[name], moved), "nothing else moves them"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "clamp": ("gpt_oss", {"swiglu_alpha": 1.0}, "with swiglu_alpha = 1.0, expected 1.702"),
    "quantized": ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "expected weights that are not"),
    "factor": ("qwen3", {"rope_parameters": {**LATENT_YARN, "attention_factor": 1.2}}, "with attention_factor = 1.2"),
    "unknown": ("gemma", {}, "of type 'gemma', expected one of llama, "),
    "activation": ("mistral", {"hidden_act": "gelu"}, "with hidden_act = gelu, expected silu"),
    "biases": ("deepseek_v3", {"attention_bias": True}, "with attention_bias = True, expected False"),
    "pairs": ("deepseek_v3", {"rope_interleave": False}, "with rope_interleave = False, expected True"),
    "positions": ("deepseek_v3", {"rope_parameters": LLAMA3}, "with rope_type = llama3, expected 'default' or 'yarn'"),
    "one expert": ("mixtral", {"num_experts_per_tok": 1}, "with num_experts_per_tok = 1, expected 2 or more with norm"),
    "unnormed": ("glm4_moe", {"norm_topk_prob": False}, "with norm_topk_prob = False, expected True"),
    "groups": ("deepseek_v3", {"n_group": 4, "topk_group": 2}, "with topk_group = 2, expected 1, half of num_experts"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "keys", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_megatrons_layers_do_not_express_is_refused(family: str, keys: dict[str, Any], message: str) -> None:
    from headrace.trainers.backends.megatron.architecture import check_fits

    model = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **keys})
    with pytest.raises(ValueError, match=message):
        check_fits(backend_config("m", backend="megatron"), model)


def test_a_split_latent_attention_needs_sequence_parallelism() -> None:
    from headrace.trainers.backends.megatron.architecture import check_fits

    keys = {**SIZES, **FAMILIES["deepseek_v3"], "first_k_dense_replace": 2}
    with pytest.raises(ValueError, match="expected true for a model with attention in a latent space and trainer.tp"):
        check_fits(backend_config("m", backend="megatron", tp=2), AutoConfig.for_model("deepseek_v3", **keys))
