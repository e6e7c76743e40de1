"""Losses, gradients, clip fractions and KL are those that TRL's own loss gives for the same rows, where it is there."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.tests.trainers.losses.reference import (
    DUAL,
    LENGTH_NORM,
    config_of,
    group_tokens,
    loss_inputs,
    random_rows,
)
from headrace.trainers.losses.config import LossConfig
from headrace.trainers.losses.step_loss import build_loss

pytestmark = [
    pytest.mark.processes,  # TRL's import looks at the machine with commands
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None, reason="trl is not installed, with whose loss the losses are compared"
    ),
]

KL: dict[str, Any] = {"kl_coef": 0.3, "kl_kind": "k3_is", "kl_max_log_ratio": None}
"""The keys that TRL's `beta` is, with TRL's defaults."""
CASES: dict[str, tuple[LossConfig, dict[str, Any]]] = {
    "token": (config_of("ppo_clip", clip_dual=None), {"loss_type": "bnpo"}),
    "token, dual clip": (config_of("ppo_clip"), {"loss_type": "bnpo", "delta": DUAL}),
    "token, KL": (config_of("ppo_clip", clip_dual=None, **KL), {"loss_type": "dapo", "beta": 0.3}),
    "token, KL without ratio": (
        config_of("ppo_clip", clip_dual=None, kl_coef=0.3, kl_max_log_ratio=None),
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "gspo, KL": (
        config_of("gspo", "sequence", **KL),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.3},
    ),
    "sequence": (config_of("ppo_clip", "sequence", clip_dual=None), {"loss_type": "grpo"}),
    "sequence_sum": (config_of("ppo_clip", "sequence_sum", clip_dual=None), {"loss_type": "dr_grpo"}),
    "gspo": (config_of("gspo", "sequence"), {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    # TRL's has no lower bound.
    "cispo": (config_of("cispo", clip_low=1.0, clip_high=0.25), {"loss_type": "cispo", "epsilon_high": 1.25}),
}


class Padded:
    """The reference's rows as TRL has them: rectangles with a mask."""

    def __init__(self, seed: int) -> None:
        self.rows = [row for row in random_rows(seed) if len(row.now)]
        self.lengths = [len(row.now) for row in self.rows]
        self.mask = torch.arange(max(self.lengths))[None] < torch.tensor(self.lengths)[:, None]

    def column(self, name: str) -> torch.Tensor:
        column = torch.zeros(self.mask.shape, dtype=torch.float64)
        column[self.mask] = torch.from_numpy(np.concatenate([getattr(row, name) for row in self.rows]))
        return column


def trl_loss(padded: Padded, **options: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, list[float]]]:
    """TRL's (loss, its gradient by log-prob of the valid tokens, metrics)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what TRL imports
        from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
        from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    now = padded.column("now").requires_grad_()
    trainer: Any = GRPOTrainer.__new__(GRPOTrainer)
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    corrected = options.pop("use_bias_correction_kl", defaults["use_bias_correction_kl"])
    args = SimpleNamespace(delta=options.pop("delta", defaults["delta"]), use_bias_correction_kl=corrected)
    attributes = {
        "args": args, "model": SimpleNamespace(training=False), "beta": 0.0, "epsilon_low": 0.15, "epsilon_high": 0.25,
        "importance_sampling_level": "token", "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "current_gradient_accumulation_steps": 1, "aux_loss_enabled": False, "use_vllm": False,
        "max_completion_length": LENGTH_NORM,
        "_entropy_bonus_enabled": False, "_metrics": {"eval": defaultdict(list)}, **options,
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (now, padded.column("entropy"), None),
    }  # fmt: skip
    for name, value in attributes.items():
        object.__setattr__(trainer, name, value)
    mask, nothing = padded.mask.long(), torch.zeros(len(padded.rows), 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": mask, "completion_mask": mask,
        "advantages": torch.tensor([row.advantage for row in padded.rows], dtype=torch.float64),
        "old_per_token_logps": padded.column("prev"), "ref_per_token_logps": padded.column("ref"),
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss = trainer._compute_loss(trainer.model, inputs)
    (slopes,) = torch.autograd.grad(loss, now)
    return loss.detach(), slopes[padded.mask], trainer._metrics["eval"]


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_trl_on_the_same_rows(name: str) -> None:
    config, options = CASES[name]
    for seed in range(5):
        padded = Padded(seed)
        inputs = loss_inputs(padded.rows, group_tokens(padded.rows))
        sums = build_loss(config)(inputs)
        (slopes,) = torch.autograd.grad(sums.loss, inputs.logprobs)
        tokens = sum(padded.lengths)
        count = tokens if config.aggregation == "token" else len(padded.rows)
        loss, expected, metrics = trl_loss(padded, **options)
        assert sums.loss.item() / count == pytest.approx(loss.item(), rel=1e-10)
        np.testing.assert_allclose(slopes / count, expected, rtol=1e-8, atol=1e-12)
        if "token" in name and "dual" not in name:
            [clipped] = metrics["clip_ratio/region_mean"]
            assert sums.metrics["clip_fraction"].item() / tokens == pytest.approx(clipped, rel=1e-6)
        if config.kl_coef and config.kind != "gspo":
            assert sums.metrics["reference_kl"].item() / tokens == pytest.approx(metrics["kl"][0], rel=1e-6)
