"""Computes the learning rate of each optimizer update from the settings of a run.

The rate depends on the number of the update alone, so that a resumed run needs no other state. After the warm-up the
formulas are those of the schedules of the same names in transformers (`transformers.get_scheduler`). In the warm-up the
rate is one update ahead of theirs, because their first update has the rate 0 and changes nothing.
"""

from __future__ import annotations

import math

from ..config import TrainerConfig

INVERSE_SQRT_UPDATES = 10_000
"""Timescale of the schedule `inverse_sqrt` without a warm-up, in updates. It is the one of transformers."""


def learning_rate(config: TrainerConfig, update: int, total_steps: int, updates_per_step: int = 1) -> float:
    """Return the learning rate of the optimizer update `update`, counted from 0 over the whole run.

    It rises linearly to the peak rate in the warm-up. Then it follows `config.schedule`, whose end it reaches after
    `total_steps` steps of `updates_per_step` updates each. Peak and end are `lr` and `min_lr`, for an adapter times
    `lora.lr_factor`. Groups of parameters multiply the rate by a factor of their own.
    """
    factor = config.lora.lr_factor if config.lora.rank else 1.0
    total = total_steps * updates_per_step
    warmup = math.ceil(config.warmup_ratio * total) if config.warmup_ratio else config.warmup_steps * updates_per_step
    if update < warmup:
        return factor * config.lr * (update + 1) / warmup
    if config.schedule == "constant":
        return factor * config.lr
    if config.schedule == "inverse_sqrt":
        scale = warmup or INVERSE_SQRT_UPDATES
        return factor * config.lr * math.sqrt(scale / (update - warmup + scale))
    height = _height(config, update, warmup, total)
    return factor * (config.min_lr + (config.lr - config.min_lr) * height)


def _height(config: TrainerConfig, update: int, warmup: int, total: int) -> float:
    """Return how far the rate is above its end, as a share of the distance from the peak to the end."""
    if update >= total:
        return 0.0
    progress = (update - warmup) / (total - warmup)
    if config.schedule == "warmup_stable_decay":
        decay = min(total - warmup, math.ceil(config.decay_ratio * total))
        progress = max(0.0, 1 - (total - update) / decay)
    if config.schedule in ("cosine", "warmup_stable_decay"):
        return 0.5 * (1 + math.cos(math.pi * progress))
    return (1 - progress) ** (config.power if config.schedule == "polynomial" else 1.0)
