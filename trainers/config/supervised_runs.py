"""Derives the sections of a supervised run, `headrace sft`, from those of a user with a section `sft`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...actors.engines.config import RouterReplayConfig
from ...actors.environments.config import EnvironmentConfig
from ...actors.images.config import ImagesConfig
from ...actors.rewards.config import RewardConfig
from ...actors.rollout.config import RolloutConfig
from ...actors.rollout.data_config import DataConfig
from ...actors.rollout.supervised.config import SftConfig
from ...actors.sample_file import SamplesConfig
from ..advantages.config import AdvantageConfig
from ..losses.config import SUPERVISED, LossConfig
from ..losses.distillation_config import DistillationConfig
from .config import AlgorithmConfig, LoggingConfig, PoolConfig, RunConfig, WarmupConfig
from .effects import shown
from .evaluation_sets import ValidationConfig

_ALGORITHM = ("mode", "max_staleness", "chunk_groups", "steps", "prompts_per_step", "minibatches", "epochs")
_LOSS = (
    "aggregation", "length_norm", "kl_coef", "kl_kind", "kl_max_log_ratio", "entropy_coef", "reference_model",
    "reference_every", "reference_mix",
)  # fmt: skip
"""Keys of sections `algorithm` and `loss` that a supervised run reads. The other keys have their defaults."""


def supervised_sections(
    sft: SftConfig,
    algorithm: AlgorithmConfig,
    loss: LossConfig,
    rollout: RolloutConfig,
    validation: ValidationConfig,
    logging: LoggingConfig,
    images: ImagesConfig,
) -> dict[str, Any]:
    """Return the sections in which a supervised run differs from the given ones: section name -> section.

    The run has no engines, the loss `sft`, and groups of one row. Sections and keys that only rollouts read get their
    defaults; of section `data` the pictures stay. `sft.epochs` becomes `algorithm.steps` if the files can be read;
    otherwise the checks of the run report the mistake. The sections of a supervised run stay as they are.
    """
    kept = {name: getattr(algorithm, name) for name in _ALGORITHM}
    if sft.epochs is not None:
        from ...actors.rollout.supervised.examples import (
            Examples,  # It imports torch, which a mistake must not wait for.
        )

        try:
            kept["steps"] = Examples(sft, validation=False, images=images).steps(algorithm.prompts_per_step)
        except ValueError:
            pass
        else:
            sft = sft.model_copy(update={"epochs": None})
    return {
        "sft": sft,
        "data": DataConfig(images=images),
        "rollout": RolloutConfig(num_engines=0, num_actors=rollout.num_actors or 1),
        "router_replay": RouterReplayConfig(),
        "environment": EnvironmentConfig(),
        "reward": RewardConfig(),
        "advantage": AdvantageConfig(),
        "evaluation": {},
        "algorithm": AlgorithmConfig(**kept, group_size=1),
        "distillation": DistillationConfig(),
        "loss": LossConfig(kind=SUPERVISED, **{name: getattr(loss, name) for name in _LOSS}),
        "validation": ValidationConfig(every=validation.every if sft.validation else 0),
        "logging": logging.model_copy(update={"samples": SamplesConfig(every=0)}),
    }


def supervised_problems(
    sft: SftConfig, loss: LossConfig, rollout: RolloutConfig, run: RunConfig, pool: PoolConfig
) -> Iterator[str]:
    """Yield one sentence for each setting that does not fit the kind of the run: supervised, or on rollouts."""
    if not sft.train:
        if loss.kind == SUPERVISED:
            yield "loss.kind: got 'sft' without sft.train, expected another loss, because rollouts are no examples"
        if not rollout.num_engines:
            yield "rollout.num_engines: got 0 without sft.train, expected at least 1, because rollouts need an engine"
        return
    for key, value in (
        ("run.record", run.record),
        ("run.replay", run.replay),
        ("run.keep_best", run.keep_best),
        ("pool.address", pool.address),
    ):
        if value:
            yield f"{key}: got {shown(value)} with sft.train, expected it unset, because such a run has no rollouts"
    if loss.kl_coef and loss.kl_kind == "k3_is":
        yield "loss.kl_kind: got 'k3_is' with sft.train, expected 'k2' or 'k3', because no policy sampled the rows"


def warmup_problems(warmup: WarmupConfig, sft: SftConfig, base: str, adapter: str | None) -> Iterator[str]:
    """Yield a sentence if a warm-up on a file does not fit the run. base: value of `trainer.lora.base`. adapter: value
    of `model.adapter`."""
    found = ["sft.train"] if sft.train else []
    found += [f"trainer.lora.base={base}"] if base != "model" else []
    found += [f"model.adapter={adapter!r}"] if adapter else []
    if warmup.on_file and found:
        yield f"warmup.corpus: got {warmup.corpus!r} with {found[0]}, expected 'none', because the two do not combine"
