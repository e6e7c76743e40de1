"""Each optimizer is the library's own over 20 updates, whatever form its moments have between them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.backends.config import TrainerConfig
from headrace.trainers.backends.optimizers.lean_adamw import LeanAdamW
from headrace.trainers.backends.optimizers.optimizer import Optimizer, build_optimizer

UPDATES, LR, DECAY, BETAS, EPS = 20, 1e-2, 0.1, (0.8, 0.95), 1e-6


class Tiny(nn.Module):
    """A model with an embedding, a matrix in 8-bit blocks, one that is too small for them, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(20, 64)
        self.wide, self.narrow = nn.Linear(64, 128), nn.Linear(128, 9, bias=False)
        self.norm = nn.RMSNorm(9)
        self.head = nn.Linear(9, 20, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"lr": LR, "weight_decay": DECAY, "betas": BETAS, "eps": EPS, **changes})


def gradients(model: nn.Module) -> Iterator[int]:
    """Give the parameters random gradients, which shrink over the updates, and yield the number of each update."""
    generator = torch.Generator().manual_seed(5)
    for update in range(UPDATES):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator) * 0.7**update
        yield update


def rate(update: int) -> float:
    return LR * (update + 1) / UPDATES


def moved(trainer: TrainerConfig) -> tuple[dict[str, torch.Tensor], Optimizer]:
    """The parameters after all updates, and the optimizer."""
    model = Tiny()
    optimizer = build_optimizer(model, trainer)
    for update in gradients(model):
        optimizer.step(rate(update))
    return {name: param.detach() for name, param in model.named_parameters()}, optimizer


def moved_by(*parts: tuple[Any, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The parameters after all updates by the optimizers of a library. parts: class of each, and its arguments, of
    which `names` lists its matrices and `vectors` the parameters without weight decay."""
    model = Tiny()
    params, made = dict(model.named_parameters()), []
    for kind, arguments in parts:
        rest = {name: value for name, value in arguments.items() if name not in ("names", "vectors")}
        groups = [
            {"params": [params[name] for name in arguments[which]], "weight_decay": decay}
            for which, decay in (("names", DECAY), ("vectors", 0.0))
            if arguments[which]
        ]
        made.append(kind(groups, lr=torch.tensor(LR) if kind.__module__.startswith("torchao") else LR, **rest))
    for update in gradients(model):
        for optimizer in made:
            for group in optimizer.param_groups:
                group["lr"] = (
                    torch.full_like(group["lr"], rate(update)) if torch.is_tensor(group["lr"]) else rate(update)
                )
            optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


MATRICES, VECTORS = ["embed.weight", "wide.weight", "narrow.weight", "head.weight"], ["wide.bias", "norm.weight"]
ADAM: dict[str, Any] = {"betas": BETAS, "eps": EPS}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    start = {name: param.detach() for name, param in Tiny().named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert (value - start[name]).abs().max() > 0.01


def test_adamw_is_torchs() -> None:
    theirs = moved_by((torch.optim.AdamW, {**ADAM, "names": MATRICES, "vectors": VECTORS, "fused": True}))
    assert_equal(moved(config())[0], theirs)


def test_muon_is_torchs_with_adamw_for_the_rest() -> None:
    hidden = {"names": ["wide.weight", "narrow.weight"], "vectors": [], "adjust_lr_fn": "match_rms_adamw"}
    rest = {**ADAM, "names": ["embed.weight", "head.weight"], "vectors": VECTORS, "fused": True}
    assert_equal(moved(config(optimizer="muon"))[0], moved_by((torch.optim.Muon, hidden), (torch.optim.AdamW, rest)))


def test_moments_in_8_bits_are_torchaos() -> None:
    from torchao.optim import AdamW8bit

    with torch.compiler.set_stance("force_eager"):
        theirs = moved_by((AdamW8bit, {**ADAM, "names": MATRICES, "vectors": VECTORS}))
    ours, optimizer = moved(config(optimizer="adamw_8bit"))
    for name, value in ours.items():
        # Theirs rounds the smallest second moments to 0.
        other = (value - theirs[name]).abs() > 2e-6
        assert other.float().mean() < (0.02 if name == "wide.weight" else 1e-9), name
    exact, _ = moved(config())
    assert (ours["wide.weight"] - exact["wide.weight"]).abs().max() > 1e-4
    assert (ours["wide.weight"] - exact["wide.weight"]).abs().max() < LR
    bits = {(value.dtype, value.numel()) for value in optimizer.tensors() if value.numel() == 64 * 128}
    assert bits == {(torch.uint8, 64 * 128)}


def test_a_weight_that_has_no_gradient_in_a_step_does_not_jump() -> None:
    """A small second moment beside a large one must not become 0."""
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = build_optimizer(nn.ParameterDict({"one": param}), TrainerConfig(optimizer="adamw_8bit"))
    for scale in (1.0, 0.0, 0.0):
        param.grad = torch.full_like(param, 1e-4 * scale)
        param.grad[:, 0] = scale
        optimizer.step(LR)
    assert param.detach().abs().max() < 3 * LR


def test_moments_in_host_memory_are_the_same_moments() -> None:
    for kind in ("adamw", "adamw_8bit"):
        ours, optimizer = moved(config(optimizer=kind, offload_optimizer=True))
        assert_equal(ours, moved(config(optimizer=kind))[0])
        assert all(isinstance(part, LeanAdamW) for part in optimizer.parts)


def test_moments_in_bfloat16_stay_close() -> None:
    torch.manual_seed(2)
    ours, optimizer = moved(config(optimizer="adamw_bf16"))
    assert_equal(ours, moved(config())[0], atol=2e-3)
    assert {value.dtype for value in optimizer.tensors() if value.numel() > 1} == {torch.bfloat16}


def test_a_second_moment_in_bfloat16_follows_changes_smaller_than_its_spacing() -> None:
    """Rounded to the nearest value, a moment with a decay of 0.999 would never fall."""
    param = nn.Parameter(torch.zeros(10_000))
    torch.manual_seed(0)
    optimizer = build_optimizer(nn.ParameterDict({"one": param}), TrainerConfig(optimizer="adamw_bf16"))
    [state] = optimizer.parts[0].state.values()
    state["exp_avg_sq"].fill_(1.0)
    for _ in range(100):
        param.grad = torch.zeros_like(param)
        optimizer.step(0.0)
    assert state["exp_avg_sq"].float().mean() == pytest.approx(0.999**100, rel=2e-3)
    nearest = torch.ones((), dtype=torch.bfloat16)
    assert nearest * 0.999 == nearest


def test_bfloat16_moments_are_rounded_alike_on_all_ranks_and_after_a_resume() -> None:
    """Ranks that hold replicas of a weight may have drawn different numbers, or have got those of another mesh."""
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Tiny()
        made.append((model, build_optimizer(model, config(optimizer="adamw_bf16"))))
        made[-1][0].load_state_dict(made[0][0].state_dict())
    noise = dict[str, list[torch.Tensor]]()
    for update in range(4):
        for model, optimizer in made:
            for number, param in enumerate(model.parameters()):
                draw = torch.Generator().manual_seed(100 * update + number)
                param.grad = torch.randn(param.shape, generator=draw)
            optimizer.step(1e-3)
            for name, value in state_of(optimizer, model).items():
                noise.setdefault(name, []).append(value.clone())
        for model, optimizer in made[1:] if update == 1 else ():
            model2 = Tiny()
            model2.load_state_dict(model.state_dict())
            resumed = build_optimizer(model2, config(optimizer="adamw_bf16"))
            resumed.restore(model2, state_of(optimizer, model))
            made[1] = (model2, resumed)
    assert all(torch.equal(*values[at : at + 2]) for values in noise.values() for at in range(0, len(values), 2))


def state_of(optimizer: Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's part of a checkpoint."""
    state = optimizer.training_state(model, torch.zeros(()))
    return {name: value for name, value in state.items() if name.startswith("optimizer.")}


def test_a_checkpoint_of_any_form_is_read_by_any_other() -> None:
    def optimizer_of(kind: str) -> tuple[Tiny, Optimizer]:
        model = Tiny()
        return model, build_optimizer(model, config(optimizer=kind), "dp1.0")

    for kind, other in (("adamw_8bit", "adamw_8bit"), ("adamw_8bit", "adamw_bf16"), ("adamw_bf16", "adamw_8bit")):
        model, optimizer = optimizer_of(kind)
        for update in gradients(model):
            optimizer.step(rate(update))
        stored = state_of(optimizer, model)
        second, resumed = optimizer_of(other)
        names = state_of(resumed, second).keys()
        resumed.restore(second, {name: value for name, value in stored.items() if name in names})
        again = state_of(resumed, second)
        for name in names & stored.keys():
            if kind == other or ".exp" not in name:
                assert torch.equal(again[name], stored[name]), name
            else:
                spread = float(stored[name].float().abs().max())
                torch.testing.assert_close(again[name].float(), stored[name].float(), rtol=0.05, atol=0.02 * spread)
        assert (kind == other) == (names == stored.keys())


def test_codes_are_exact_without_the_scales_of_the_same_mesh_only_for_zeros() -> None:
    model = Tiny()
    optimizer = build_optimizer(model, config(optimizer="adamw_8bit"), "dp2.0")
    other = build_optimizer(model, config(optimizer="adamw_8bit"), "dp1.0")
    for update in gradients(model):
        optimizer.step(rate(update))
    stored = {name: value for name, value in state_of(optimizer, model).items() if ".scale." not in name}
    other.restore(model, stored)
    again = state_of(other, model)
    assert any(name.endswith("exp_avg.scale.dp1.0") for name in again)
    for name, value in stored.items():
        torch.testing.assert_close(again[name], value, rtol=0.08, atol=0.01 * float(value.abs().max()))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.trainers.backends.optimizers import lean_adamw

    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    lean_adamw._rounding.cache_clear()
    with pytest.raises(ValueError, match=r"trainer.optimizer: got 'adamw_8bit', which needs torchao: pip install 'hea"):
        build_optimizer(Tiny(), config(optimizer="adamw_8bit"))


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        (
            {"optimizer": "adamw_8bit", "backend": "megatron"},
            "trainer.optimizer: got 'adamw_8bit' with trainer.backend=",
        ),
        (
            {"optimizer": "muon", "offload_optimizer": True},
            "trainer.offload_optimizer: got true with trainer.optimizer",
        ),
        (
            {"offload": True, "offload_optimizer": True, "dp": 2},
            "trainer.offload_optimizer: got true with trainer.offl",
        ),
        ({"optimizer": "lion"}, "trainer.optimizer: got 'lion', expected one of adamw, adamw_8bit, adamw_bf16, muon"),
    ],
)
def test_settings_that_do_not_fit_are_refused(trainer: dict[str, Any], sentence: str) -> None:
    assert only_problem({"trainer": trainer}).startswith(sentence)


def test_a_model_that_is_not_trained_has_no_optimizer_whatever_the_run_s_has() -> None:
    """Teachers and reference models have the settings of the policy's backend."""
    model = nn.Linear(4, 4).requires_grad_(False)
    config = TrainerConfig.model_validate({"groups": [{"pattern": "*lora_B*"}], "optimizer": "adamw_8bit"})
    assert build_optimizer(model, config).parts == ()


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_a_rank_without_values_of_a_weight_counts_its_steps(bits: int) -> None:
    """A checkpoint has the count of one rank, which all ranks get after a resume."""
    empty = nn.Parameter(torch.zeros(0, 4))
    group = {"params": [empty], "weight_decay": 0.1}
    optimizer = LeanAdamW([group], lr=1e-3, betas=(0.9, 0.99), eps=1e-8, bits=bits, host=False, place="")
    for _ in range(2):
        empty.grad = torch.zeros(0, 4)
        optimizer.step()
    assert optimizer.state[empty]["step"] == 2
