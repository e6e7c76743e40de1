"""Warms up the model of a run on a user's conversations: a supervised run of its own in the folder `warmup`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ..backends.lora_config import LoraConfig
from ..base_model.prepare import WARMUP
from ..config.config import AlgorithmConfig, Config, PoolConfig, WarmupConfig
from ..config.supervised_runs import as_supervised
from ..grpo.checkpoints import Checkpoints, NoCheckpoint

RISE_STEPS = 25
"""Largest number of steps in which the learning rate rises."""


def warmup_run(config: Config, folder: Path) -> Config:
    """Return the configuration of the warm-up of a run. It trains all weights of the model with the run's backend and
    mesh. The learning rate rises to `warmup.lr` and falls to 0. folder: the run folder."""
    warmup = config.warmup
    changed = {
        "run": {
            "dir": str(folder / WARMUP),
            "name": f"{config.run.name}: warm-up",
            "record": False,
            "replay": None,
            "keep_best": False,
        },
        "sft": {"train": (warmup.corpus,), "validation": None, "epochs": None},
        "trainer": {
            "lr": warmup.lr,
            "min_lr": 0.0,
            "schedule": "linear",
            "warmup_steps": min(RISE_STEPS, warmup.steps),
            "lora": LoraConfig(),
        },
    }
    sections = {name: getattr(config, name).model_copy(update=keys) for name, keys in changed.items()}
    algorithm = AlgorithmConfig(steps=warmup.steps, prompts_per_step=warmup.batch_size)
    return as_supervised(
        config.model_copy(
            update={**sections, "algorithm": algorithm, "warmup": WarmupConfig(), "pool": PoolConfig()},
        )
    )


def warm_up(config: Config, folder: Path, train: Callable[[Config, bool], Path]) -> None:
    """Carry out the warm-up of a run on a file, unless that is done or the run has none. A warm-up that was interrupted
    goes on from its checkpoint. train: function that trains a configuration, with True to resume."""
    run = folder / WARMUP
    if not config.warmup.on_file or (run / "model").is_dir():
        return
    try:
        Checkpoints(run / "checkpoints").latest_state()
    except (NoCheckpoint, FileNotFoundError):
        shutil.rmtree(run, ignore_errors=True)
        train(warmup_run(config, folder), False)
    else:
        train(warmup_run(config, folder), True)
