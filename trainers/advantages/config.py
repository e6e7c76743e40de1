"""Defines the section `advantage` of the configuration, which says how rewards become advantages."""

from __future__ import annotations

from typing import Literal

from ...dataplane.config import Section


class AdvantageConfig(Section):
    """Settings of the estimator that turns the rewards of each prompt's samples into advantages."""

    kind: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "gdpo"] = "grpo"
    """Estimator of the advantages. `grpo` subtracts the group's mean reward and divides by the group's standard
    deviation (arXiv:2402.03300). `dr_grpo` subtracts the mean and does not divide (arXiv:2503.20783). `rloo` subtracts
    the mean of the group's other samples (arXiv:2402.14740). `reinforce_pp` normalises rewards over the whole step
    (arXiv:2501.03262). `gdpo` normalises the values of each reward function within the group and then adds the results
    (arXiv:2601.05242)."""
    baseline: Literal["step", "group"] = "step"
    """Rows whose mean reward `reinforce_pp` subtracts from each reward: `step` means all rows of the step, `group` the
    rows of the same group."""

    @property
    def compares_group(self) -> bool:
        """True if a row's advantage comes from a comparison with other rows of its group."""
        return self.kind != "reinforce_pp" or self.baseline == "group"
