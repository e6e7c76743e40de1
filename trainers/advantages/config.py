"""The section `advantage` of the configuration: how rewards become advantages."""

from __future__ import annotations

from typing import Literal

from ...dataplane.section import Section


class AdvantageConfig(Section):
    """How rewards become advantages."""

    kind: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "gdpo"] = "grpo"
    """`grpo`: minus the group's mean, over its deviation (arXiv:2402.03300); `dr_grpo`: not divided (arXiv:2503.20783);
    `rloo`: minus the mean of the group's others (arXiv:2402.14740); `reinforce_pp`: normalised over the whole step
    (arXiv:2501.03262); `gdpo`: each reward function normalised in its group, then added (arXiv:2601.05242)."""
    normalize_std: bool = True
    """Whether `grpo` divides by the group's standard deviation."""
    baseline: Literal["step", "group"] = "step"
    """Rows whose mean reward `reinforce_pp` subtracts: all of the step, or the row's group."""
