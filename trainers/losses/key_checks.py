"""Keys of the `loss` section that do not fit one another; no heavy imports, as the configuration is checked with it."""

from __future__ import annotations

from typing import Protocol

CORRECTION_BOUNDS: dict[str, tuple[float | None, float]] = {
    "tis": (None, 2.0),
    "icepop": (0.5, 5.0),
    "sequence": (None, 2.0),
    "sequence_mask": (0.0, 2.0),
}
"""Bounds of the weights where the keys say nothing; None: the correction has no lower one. IcePop's are Ring-1T's."""


class LossKeys(Protocol):
    """What the run's configuration and the factory's have in common."""

    @property
    def kind(self) -> str: ...
    @property
    def aggregation(self) -> str: ...
    @property
    def length_norm(self) -> int | None: ...
    @property
    def clip_dual(self) -> float | None: ...
    @property
    def correction(self) -> str: ...
    @property
    def correction_low(self) -> float | None: ...
    @property
    def correction_high(self) -> float | None: ...


def correction_bounds(loss: LossKeys) -> tuple[float, float]:
    """(low, high) of a correction's weights, from the keys or by default; low is 0 when there is no lower bound."""
    low, high = CORRECTION_BOUNDS[loss.correction]
    return (
        (low or 0.0) if loss.correction_low is None else loss.correction_low,
        high if loss.correction_high is None else loss.correction_high,
    )


def loss_problems(loss: LossKeys) -> list[str]:
    """One sentence for each key that another key leaves without effect or contradicts."""
    problems = []
    bounded = loss.correction in CORRECTION_BOUNDS
    if loss.clip_dual is not None and loss.kind != "ppo_clip":
        problems.append(
            f"loss.clip_dual: got {loss.clip_dual} with loss.kind={loss.kind!r}, expected null, as only ppo_clip has a "
            "second clip"
        )
    if loss.length_norm is not None and loss.aggregation != "sequence_sum":
        problems.append(
            f"loss.length_norm: got {loss.length_norm} with loss.aggregation={loss.aggregation!r}, expected null, as "
            "only sequence_sum divides by it"
        )
    if loss.correction_low is not None and (not bounded or CORRECTION_BOUNDS[loss.correction][0] is None):
        problems.append(
            f"loss.correction_low: got {loss.correction_low} with loss.correction={loss.correction!r}, expected null, "
            "as only icepop and sequence_mask have a lower bound"
        )
    if loss.correction_high is not None and not bounded:
        problems.append(
            f"loss.correction_high: got {loss.correction_high} with loss.correction={loss.correction!r}, expected "
            "null, as there is nothing to bound"
        )
    if bounded:
        low, high = correction_bounds(loss)
        if not 0 <= low < high:
            problems.append(
                f"loss.correction_high: got {high}, expected a number above loss.correction_low={low}, which is 0 or "
                "more"
            )
    return problems
