"""Derives the configuration of a supervised run, `headrace sft`, from that of a user with a section `sft`."""

from __future__ import annotations

from collections.abc import Iterator

from ...actors.engines.config import RouterReplayConfig
from ...actors.environments.config import EnvironmentConfig
from ...actors.rewards.config import RewardConfig
from ...actors.rollout.config import RolloutConfig
from ...actors.rollout.data_config import DataConfig
from ...actors.rollout.supervised.examples import Examples
from ..advantages.config import AdvantageConfig
from ..losses.config import SUPERVISED, LossConfig
from .config import AlgorithmConfig, Config
from .effects import shown
from .evaluation_sets import ValidationConfig

_ALGORITHM = ("mode", "max_staleness", "chunk_groups", "steps", "prompts_per_step", "minibatches", "epochs")
_LOSS = ("aggregation", "length_norm", "kl_coef", "kl_kind", "kl_max_log_ratio", "entropy_coef")
"""Keys of sections `algorithm` and `loss` that a supervised run reads. The other keys have their defaults."""


def as_supervised(config: Config) -> Config:
    """Return the configuration of a supervised run, without engines, with the loss `sft` and with groups of one row.

    Sections and keys that only rollouts read get their defaults. `sft.epochs` becomes `algorithm.steps` if the files
    can be read; otherwise the checks of the run report the mistake. Idempotent.
    """
    algorithm = {name: getattr(config.algorithm, name) for name in _ALGORITHM}
    sft = config.sft
    if sft.epochs is not None:
        try:
            algorithm["steps"] = Examples(sft, validation=False).steps(config.algorithm.prompts_per_step)
        except ValueError:
            pass
        else:
            sft = sft.model_copy(update={"epochs": None})
    samples = config.logging.samples.model_copy(update={"every": 0})
    return config.model_copy(
        update={
            "sft": sft,
            "data": DataConfig(),
            "rollout": RolloutConfig(num_engines=0, num_actors=config.rollout.num_actors or 1),
            "router_replay": RouterReplayConfig(),
            "environment": EnvironmentConfig(),
            "reward": RewardConfig(),
            "advantage": AdvantageConfig(),
            "evaluation": {},
            "algorithm": AlgorithmConfig(**algorithm, group_size=1),
            "loss": LossConfig(kind=SUPERVISED, **{name: getattr(config.loss, name) for name in _LOSS}),
            "validation": ValidationConfig(every=config.validation.every if sft.validation else 0),
            "logging": config.logging.model_copy(update={"samples": samples}),
        }
    )


def supervised_problems(config: Config) -> Iterator[str]:
    """Yield one sentence for each setting that does not fit the kind of the run: supervised, or on rollouts."""
    if config.warmup.on_file and (config.sft.train or config.trainer.lora.base != "model"):
        key = "sft.train" if config.sft.train else f"trainer.lora.base={config.trainer.lora.base}"
        yield f"warmup.corpus: got {config.warmup.corpus!r} with {key}, expected 'none', because the two do not combine"
    if not config.sft.train:
        if config.loss.kind == SUPERVISED:
            yield "loss.kind: got 'sft' without sft.train, expected another loss, because rollouts are no examples"
        if not config.rollout.num_engines:
            yield "rollout.num_engines: got 0 without sft.train, expected at least 1, because rollouts need an engine"
        return
    for key, value in (
        ("run.record", config.run.record),
        ("run.replay", config.run.replay),
        ("run.keep_best", config.run.keep_best),
        ("pool.address", config.pool.address),
    ):
        if value:
            yield f"{key}: got {shown(value)} with sft.train, expected it unset, because such a run has no rollouts"
    if config.loss.kl_coef and config.loss.kl_kind == "k3_is":
        yield "loss.kl_kind: got 'k3_is' with sft.train, expected 'k2' or 'k3', because no policy sampled the rows"
