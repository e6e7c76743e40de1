"""Warms up the model of a run on a user's conversations: a supervised run of its own in the folder `warmup`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...actors.engines.config import ModelConfig
from ...actors.rollout.supervised.config import SftConfig
from ..backends.config import TrainerConfig
from ..backends.lora_config import LoraConfig
from ..base_model.prepare import WARMUP
from ..config.config import AlgorithmConfig, PoolConfig, RunConfig, WarmupConfig
from ..config.load import build_config
from ..grpo.checkpoints import Checkpoints, NoCheckpoint
from ..losses.config import LossConfig

RISE_STEPS = 25
"""Largest number of steps in which the learning rate rises."""


def warmup_sections(
    warmup: WarmupConfig, run: RunConfig, model: ModelConfig, sft: SftConfig, trainer: TrainerConfig, folder: Path
) -> dict[str, Any]:
    """Return the sections in which the warm-up of a run differs from it: section name -> section. The warm-up trains
    all weights of the model with the run's backend and mesh, by the mean of -log p alone, and no renderer, because
    it has no environment. The learning rate rises to `warmup.lr` and falls to 0. folder: the run folder."""
    plain = {"record": False, "replay": None, "keep_best": False}
    rate = {
        "lr": warmup.lr,
        "min_lr": 0.0,
        "schedule": "linear",
        "warmup_steps": min(RISE_STEPS, warmup.steps),
        "warmup_ratio": 0.0,
        "lora": LoraConfig(),
        "freeze": (),
        "groups": (),
    }
    return {
        "run": run.model_copy(update={"dir": str(folder / WARMUP), "name": f"{run.name}: warm-up", **plain}),
        "model": model.model_copy(update={"renderer": "template", "renderer_options": {}}),
        "sft": sft.model_copy(update={"train": (warmup.corpus,), "validation": None, "epochs": None}),
        "trainer": trainer.model_copy(update=rate),
        "loss": LossConfig(),
        "algorithm": AlgorithmConfig(steps=warmup.steps, prompts_per_step=warmup.batch_size),
        "warmup": WarmupConfig(),
        "pool": PoolConfig(),
    }


def warm_up(sections: Mapping[str, Any], folder: Path, train: Callable[..., Path]) -> None:
    """Carry out the warm-up of the run in `folder`, unless that is done. A warm-up that was interrupted goes on from
    its checkpoint. sections: all sections of the warm-up, as plain values. train: function that trains a configuration,
    given as `resume` whether to resume it. Raises ConfigError if they do not fit each other."""
    run = folder / WARMUP
    if (run / "model").is_dir():
        return
    try:
        Checkpoints(run / "checkpoints").latest_state()
    except (NoCheckpoint, FileNotFoundError):
        shutil.rmtree(run, ignore_errors=True)
        train(build_config(sections), resume=False)
    else:
        train(build_config(sections), resume=True)
