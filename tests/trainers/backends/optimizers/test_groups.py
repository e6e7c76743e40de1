"""Roles and names of weights decide whether they are trained, at which rate, and with which weight decay."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from headrace.tests.trainers.backends.backend_ranks import backend_config, random_rows, run_step, weights_of
from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.backends.config import TrainerConfig
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.optimizers.groups import freeze, hidden_matrices, parameter_groups, undecayed

EMBEDDING = "model.embed_tokens.weight"


def by_name(model: nn.Module, config: TrainerConfig) -> dict[str, tuple[float, float]]:
    """The factor of the learning rate and the weight decay of each trained parameter."""
    found = {
        id(param): (group["lr_factor"], group["weight_decay"])
        for group in parameter_groups(model, config)
        for param in group["params"]
    }
    return {name: found[id(param)] for name, param in model.named_parameters() if param.requires_grad}


class HeadNorm(nn.Module):
    """A norm of its own for each head, as Cohere has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))


def test_weight_decay_is_of_matrices_alone() -> None:
    model, experts, mixer = nn.Module(), nn.Module(), nn.Module()
    experts.gate_up_proj, experts.gate_up_proj_bias = nn.Parameter(torch.ones(2, 3, 4)), nn.Parameter(torch.ones(2, 4))
    mixer.A_log, mixer.conv1d = nn.Parameter(torch.ones(4, 2)), nn.Conv1d(4, 4, 3, groups=4)
    model.q_norm, model.experts, model.mixer, model.head = HeadNorm(), experts, mixer, nn.Linear(3, 2)
    decays = by_name(model, TrainerConfig(weight_decay=0.1))
    assert {name for name, (_, decay) in decays.items() if decay} == {
        "experts.gate_up_proj", "mixer.conv1d.weight", "head.weight",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["tied", "moe", "biased"])
def test_the_roles_are_those_of_the_trainer_of_transformers(folder: Path, tmp_path: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    theirs = set(Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True)).get_decay_parameter_names(model))
    params, without = dict(model.named_parameters()), undecayed(model)  # Theirs have a tied weight twice.
    ours = {name for name, param in params.items() if id(param) not in without}
    assert ours == theirs & params.keys() and EMBEDDING in ours


def test_muon_takes_the_matrices_of_decoder_layers(folder: Path) -> None:
    for name in ("tied", "untied", "moe"):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        params, hidden = dict(model.named_parameters()), hidden_matrices(model)
        chosen = {name for name, param in params.items() if id(param) in hidden}
        assert chosen == {
            name for name, param in params.items() if ".layers." in name and param.ndim == 2 and "norm" not in name
        }


def test_the_first_pattern_that_matches_decides(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "untied")
    groups: Any = [
        {"pattern": "*.0.mlp.*", "lr_factor": 0.5},
        {"pattern": "*.mlp.*", "lr_factor": 2.0, "weight_decay": 0.0},
        {"pattern": "*norm*", "weight_decay": 0.3},
    ]
    found = by_name(model, TrainerConfig.model_validate({"weight_decay": 0.1, "groups": groups}))
    assert found["model.layers.0.mlp.up_proj.weight"] == (0.5, 0.1)
    assert found["model.layers.1.mlp.up_proj.weight"] == (2.0, 0.0)
    assert found["model.norm.weight"] == (1.0, 0.3)
    assert found["lm_head.weight"] == (1.0, 0.1) and len(found) == len(list(model.parameters()))


def test_a_tied_weight_has_both_of_its_names(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "tied")
    found = by_name(model, TrainerConfig.model_validate({"groups": [{"pattern": "lm_head.*", "lr_factor": 3.0}]}))
    assert found[EMBEDDING] == (3.0, 0.0)
    freeze(model, ["lm_head.*"])
    assert EMBEDDING not in by_name(model, TrainerConfig())


def test_a_step_with_groups_and_frozen_weights(folder: Path) -> None:
    groups = [{"pattern": "*.mlp.*", "lr_factor": 0.5, "weight_decay": 0.0}]
    frozen = ("model.embed_tokens.*", "*norm*")
    config = backend_config(str(folder / "untied"), groups=groups, freeze=frozen, grad_clip=None)
    plain = backend_config(str(folder / "untied"), grad_clip=None, weight_decay=0.0)
    with (
        contextlib.closing(FsdpBackend(config, 0, 1)) as backend,
        contextlib.closing(FsdpBackend(plain, 0, 1)) as other,
    ):
        before = weights_of(backend)
        norms = [run_step(one, [random_rows(0, 10)])["train/grad_norm"] for one in (backend, other)]
        after, whole = weights_of(backend), weights_of(other)
    assert norms[0] < norms[1], "the norm is that of trained weights"
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if EMBEDDING not in name and "norm" not in name}
    for name in (name for name in moved if ".mlp." in name):
        half = 0.5 * (whole[name] - before[name])
        torch.testing.assert_close(after[name] - before[name], half, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"freeze": ["*.experts.*"]}, "trainer.freeze: got the pattern '*.experts.*', which matches no trained weight"),
        ({"freeze": ["*"]}, "trainer.freeze: got ['*'], which freezes all weights of Qwen3ForCausalLM, expected"),
        ({"groups": [{"pattern": "lm_head"}]}, "trainer.groups: got the pattern 'lm_head', which matches no trained w"),
        ({"groups": [{"pattern": "*embed*"}], "freeze": ["*embed*"]}, "trainer.groups: got the pattern '*embed*', whi"),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused(folder: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        FsdpBackend(backend_config(str(folder / "untied"), **settings), 0, 1)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"freeze": ["*"], "lora": {"rank": 4}}, "trainer.freeze: got ['*'] with trainer.lora.rank=4, expected []"),
        ({"groups": [{"lr_factor": 2.0}]}, "trainer.groups.0.pattern: not set, expected a value"),
    ],
)
def test_settings_that_do_not_fit_are_refused(trainer: dict[str, Any], sentence: str) -> None:
    assert sentence in only_problem({"trainer": trainer})
