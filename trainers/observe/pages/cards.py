"""Makes the cards at the top of a run's page, which show what decides a run, and the table of its further figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....actors.failures import FAILURE_KINDS
from ....actors.rollout.evaluation_metrics import REWARD
from ..metrics import ELAPSED, HEALTH, best_of, judged_format, judged_label
from .plots import Columns


@dataclass(frozen=True, slots=True)
class Card:
    """A figure of a run with a name and a small print."""

    label: str
    value: str
    small: str
    key: str = ""
    """Key of the curve that the card draws; "" for none."""
    bad: bool = False
    """True if the card reports something that the run has lost."""


_FORMS = {key: form for _, key, form in HEALTH}
_DECISIVE = (
    ("KL to the reference", ("train/reference_kl",), True),
    ("KL to the teachers", ("distillation/reverse_kl",), True),
    ("Engine mismatch", ("logprob/ratio_error",), True),
    ("Entropy", ("train/entropy", "train/sampled_entropy"), False),
    ("Truncated answers", ("rollout/truncated_share",), False),
)
"""Metrics that decide a run, as (label, keys of which the first that the run has is shown, whether the card is left out
while the value is 0)."""
_SPEED = "rollout/tokens_per_s"


def card_keys(judged: str) -> list[str]:
    """Return the keys of all curves that cards can draw. judged: key of the metric that `validation.metric` names."""
    return [judged, "reward/mean", *(key for _, keys, _ in _DECISIVE for key in keys), _SPEED, "time/step_s"]


def cards(columns: Columns, judged: str = REWARD) -> list[Card]:
    """Return the cards of a run. There is no card for metrics that the records lack. judged: key of the metric that
    `validation.metric` names."""
    made = list[Card]()
    steps, values = columns[judged]
    if values:
        form, best = judged_format(judged), best_of(judged, values)
        first = f"; step {steps[0]:.0f}: {values[0]:{form}}" if len(values) > 1 else ""
        small = f"best {best:{form}} at step {steps[values.index(best)]:.0f}{first}"
        made.append(Card(judged_label(judged).capitalize(), f"{values[-1]:{form}}", small, judged))
    if values := columns["reward/mean"][1]:
        small = f"first {values[0]:.3f}, best {max(values):.3f}"
        made.append(Card("Reward", f"{values[-1]:.3f}", small, "reward/mean"))
    for label, keys, may_miss in _DECISIVE:
        key = next((key for key in keys if columns[key][1]), "")
        values = columns[key][1] if key else []
        if values and (any(values) or not may_miss):
            made.append(Card(label, f"{values[-1]:{_FORMS[key]}}", f"first {values[0]:{_FORMS[key]}}", key))
    if values := columns[_SPEED][1]:
        small = f"median {_count(statistics.median(values))}"
        made.append(Card("Tokens per second", _count(values[-1]), small, _SPEED))
    if values := columns["time/step_s"][1]:
        small = f"{seconds_text(statistics.median(values))} per step, median"
        made.append(Card("Wall time", seconds_text(_wall_s(columns)), small, "time/step_s"))
    return made + _losses(columns)


def _wall_s(columns: Columns) -> float:
    """Return the seconds from a run's start to its last step, without those between its end and a resume. In each
    process that worked on the run, the times of the records begin at 0."""
    times = columns[ELAPSED][1] or [sum(columns["time/step_s"][1])]
    return sum(before for before, after in zip(times, times[1:], strict=False) if after < before) + times[-1]


def _losses(columns: Columns) -> list[Card]:
    """Return one card for each kind of failure that the run survived, such as dropped groups or restarts."""
    kinds: Sequence[tuple[str, str, Callable[[Sequence[float]], float], str]] = (
        ("Failed rows", "rollout/failed_rows", sum, "masked"),
        *((f"Failed, {kind}", f"episodes/failed/{kind}", sum, "episodes that failed so") for kind in FAILURE_KINDS),
        ("Episodes retried", "episodes/retried", sum, "they had failed"),
        ("Turns recovered", "episodes/recovered_turns", sum, "not generated again"),
        ("Groups dropped", "rollout/groups_dropped", sum, "no signal; other prompts in their place"),
        ("Groups too old", "rollout/groups_stale", sum, "cleared, rolled out again or dropped"),
        ("Groups issued again", "rollout/groups_reissued", sum, "their actor died"),
        ("Rows from the journal", "rollout/restored_rows", sum, "not generated again"),
        ("Steps skipped", "train/skipped", sum, "no row to train on, or a gradient was not finite"),
        ("Actors replaced", "rollout/actors_replaced", max, "rollout actors and engines that died"),
        ("Restarts", "run/restarts", max, "from the last checkpoint"),
    )
    counts = ((label, merge(columns[key][1] or [0]), small) for label, key, merge, small in kinds)
    return [Card(label, _count(count), small, bad=True) for label, count, small in counts if count]


def further_figures(columns: Columns) -> list[tuple[str, str, str]]:
    """Return the figures that no card shows, as (label, value, note)."""
    shown = {key for _, keys, _ in _DECISIVE for key in keys}
    rows = []
    for label, key, form in HEALTH:
        values = columns[key][1]
        if any(values) and key not in shown:
            rows.append((label, f"{values[-1]:{form}}", f"last step; first {values[0]:{form}}"))
    for label, key, show in (
        ("time of validations", "time/validate_s", seconds_text),
        ("put per step", "dataplane/bytes_put", _bytes),
        ("got per step", "dataplane/bytes_got", _bytes),
        ("through the driver, per row", "driver/bytes_per_row", _bytes),
        ("peak memory of a rank, GiB", "memory/peak_gib", "{:.2f}".format),
        ("training idle", "idle/train", "{:.0%}".format),
        ("rollouts idle", "idle/rollout", "{:.0%}".format),
    ):
        if values := columns[key][1]:
            rows.append((label, show(statistics.median(values)), f"median; largest {show(max(values))}"))
    if any(stale := columns["staleness/max"][1]):
        mean = statistics.fmean(columns["staleness/mean"][1] or [0.0])
        rows.append(("staleness, versions", f"{mean:.2g}", f"mean of rows; oldest {max(stale):.0f}"))
    return rows


def seconds_text(value: float) -> str:
    """Format a duration in seconds as text with a suitable unit."""
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _count(value: float) -> str:
    return f"{value:,.0f}"
