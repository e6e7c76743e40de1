"""Writes a run's metrics as JSON lines to metrics.jsonl, hands them to the trackers, and reads metrics.jsonl back.

Keys are flat: `reward/`, `reward_by_source/`, `advantage/`, `val/`, `eval/`, `sft/`, `validation/`, `rollout/`,
`queue/`, `staleness/`, `train/`, `logprob/`, `policy/`, `dataplane/`, `driver/`, `idle/`, `sync/`, `switch/`, `pool/`,
`pictures/`, `run/`, `memory/` and, in seconds, `time/`. `time/step_s` is the time of a step without the validation
after it. `time/elapsed_s` counts from the writer's start. `time/rollout_s` is the driver's wait for groups.
`time/data_wait_s`, the time that train workers waited for rows, is part of `time/logprob_s` and `time/train_s`.
docs/reference/metrics.md explains every key.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...actors.process.json_lines import append, encoded, read_lines
from ...actors.rollout.evaluation_metrics import RESPONSE_LENGTH, needs_answers
from ..config.config import HELD_OUT_LOSS
from ..errors import UserError
from .tracking import Tracking

FINISHED = "finished"
RESUMED = "resumed"
REPLACED = "replaced"
"""Name of the event that reports the replacement of an actor. FINISHED and RESUMED are also names of events. An event
is a line of metrics.jsonl about something other than a step."""
ELAPSED = "time/elapsed_s"
SWITCH = "time/switch_s"
"""Metric of the seconds that a run spent on passing GPU memory between engines and train workers."""
Record = dict[str, Any]
"""A line of metrics.jsonl."""


def time_split(record: Mapping[str, float | None]) -> dict[str, float]:
    """Split a step's seconds by stage, so that they add up to `time/step_s`. Empty if the record has no step time.

    The stages are, in order, `rollout`, `data wait`, `log-probs`, `train`, `sync`, `switch` in runs whose roles take
    turns, and `other`.
    """
    total = record.get("time/step_s")
    if not total:
        return {}
    wait, logprob, train = (record.get(f"time/{name}_s") or 0.0 for name in ("data_wait", "logprob", "train"))
    wait = min(wait, logprob + train)
    # The first pass over the rows includes the wait for them.
    in_logprob = min(wait, logprob)
    split = {
        "rollout": record.get("time/rollout_s") or 0.0,
        "data wait": wait,
        "log-probs": logprob - in_logprob,
        "train": train - (wait - in_logprob),
        "sync": record.get("time/sync_s") or 0.0,
    }
    if SWITCH in record:
        split["switch"] = record[SWITCH] or 0.0
    return {**split, "other": max(0.0, total - sum(split.values()))}


def judged_label(judged: str) -> str:
    """Return the label that is shown to readers for `judged`, the key of the metric that `validation.metric` names."""
    return f"held-out {judged.removeprefix('val/').removeprefix('validation/').replace('_', ' ')}"


def best_of(judged: str, values: Sequence[float]) -> float:
    """Return the best of the values of a metric. That is the lowest loss, or the highest value of any other metric.
    judged: key of the metric."""
    return min(values) if judged == HELD_OUT_LOSS else max(values)


def judged_format(judged: str) -> str:
    """Return the format string for values of `judged`, the key of the metric that `validation.metric` names. Shares of
    exact matches are shown in percent, rewards with three decimals."""
    return ".1%" if needs_answers(judged) else ".3f"


HEALTH = (
    ("reward std", "reward/std", ".3f"),
    ("groups without signal", "reward/flat_groups_share", ".0%"),
    ("largest advantage", "advantage/max", ".3g"),
    ("smallest advantage", "advantage/min", ".3g"),
    ("truncated answers", "rollout/truncated_share", ".0%"),
    ("tokens of ended answers", "rollout/ended_length_mean", ".1f"),
    ("sampled entropy", "train/sampled_entropy", ".3f"),
    ("entropy", "train/entropy", ".3f"),
    ("learning rate", "train/lr", ".2g"),
    ("engine mismatch", "logprob/ratio_error", ".4f"),
    ("largest token's gradient", "train/token_gradient_share", ".1%"),
    ("KL to the reference", "train/reference_kl", ".3g"),
    ("KL to the teachers", "distillation/reverse_kl", ".3g"),
    ("clipped tokens", "train/clip_fraction", ".1%"),
)
"""Metrics that show whether a run learns, as (label, key, format). Terminal, report and comparison show them all."""
CONDITIONS = ("step", "version", "version_first", "version_last", "seconds")
"""Names of an evaluation's metrics that say what was evaluated and not how good it is."""


def evaluation_figures(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the metric keys among `keys` that are results of evaluations, by set.

    A set is the first part of such a key: `val` or `eval/NAME`."""
    found: dict[str, list[str]] = {}
    for key in keys:
        root, _, name = key.partition("/")
        if root == "eval":
            root, name = f"eval/{name.partition('/')[0]}", name.partition("/")[2]
        elif root != "val":
            continue
        if name not in CONDITIONS:
            found.setdefault(root, []).append(key)
    return found


def evaluation_title(prefix: str) -> str:
    """Return the title of an evaluation set whose metric keys begin with `prefix`."""
    return "validation" if prefix == "val" else f"evaluation {prefix.removeprefix('eval/')}"


def evaluation_text(prefix: str, metrics: Mapping[str, float | None], *, brief: bool = False) -> str:
    """Return the results of one set, whose keys begin with `prefix`, as text; "" if `metrics` has none. With `brief`,
    leaves out the lengths of answers and the figures of single reward functions."""
    parts = []
    for key in evaluation_figures(metrics).get(prefix, ()):
        value, name = metrics[key], key.removeprefix(f"{prefix}/")
        if brief and ("/" in name or name == RESPONSE_LENGTH):
            continue
        if value is not None and math.isfinite(value) and not (name == "failed_rows" and value == 0):
            form = ".0f" if name == "failed_rows" else ".1f" if name == RESPONSE_LENGTH else ".3f"
            parts.append(f"{name} {value:{form}}")
    return "  ".join(parts)


ATTEMPT = "run/attempt"
"""Metric of the number of times that the run had returned to a checkpoint or been resumed when a line was written. If a
step has several lines, the line with the largest value counts."""


class MetricsWriter:
    """Appends metrics to metrics.jsonl, a whole line at a time, and hands them to the trackers. Must be used by one
    thread of one process only."""

    def __init__(self, path: str | os.PathLike[str], tracking: Tracking | None = None) -> None:
        """Append to `path`, which is created. tracking: trackers that get the same metrics; None for none."""
        self._start = time.monotonic()
        self.begun = False
        """Whether a step has been logged."""
        self.finished = False
        """Whether the run has reached its end."""
        self._tracking = tracking
        self._path = Path(path)
        append(path, b"")
        mark = b"{" + f'"event": "{RESUMED}"'.encode()
        self._attempt = sum(line.startswith(mark) for line in Path(path).read_bytes().splitlines())

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line for `step`. Values are numbers, numpy or torch scalars, or None; NaN and infinity become null.

        For any other value, raises ValueError that names its key, before anything is written.
        """
        line: dict[str, Any] = {"step": int(step)}
        for key, value in metrics.items():
            line[key] = _number(key, value)
        line |= {ELAPSED: self.elapsed_s, ATTEMPT: self._attempt}
        self._append(line)
        self.begun = True
        if self._tracking is not None:
            self._tracking.log(step, {key: value for key, value in line.items() if value is not None and key != "step"})

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Append an event, `{"event": name, "step": step, ...}`. An event is a line about something other than the
        metrics of a step. fields: JSON values."""
        self._append({"event": name, "step": step, ELAPSED: self.elapsed_s, **fields})
        self._attempt += name == RESUMED

    def finish(self, step: int, **fields: Any) -> None:
        """Append the `finished` event, which is the last line of a completed run."""
        self.event(FINISHED, step, **fields)
        self.finished = True

    @property
    def elapsed_s(self) -> float:
        """Seconds since this writer was created."""
        return round(time.monotonic() - self._start, 3)

    def close(self) -> None:
        """End the trackers. Idempotent."""
        if self._tracking is not None:
            self._tracking.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        append(self._path, encoded([line]))


def _number(key: str, value: Any) -> float | int | None:
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise ValueError(f"metric {key!r}: got {value!r}, expected a number or None")


def read_run(folder: str | os.PathLike[str]) -> tuple[list[Record], list[Record]]:
    """Return the metrics of the run in `folder` as `read_metrics` does. Raises UserError if the folder has no
    metrics.jsonl or a broken one."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{folder}: the folder has no metrics.jsonl, expected a run folder")
    return read_metrics(path)


def read_metrics(path: str | os.PathLike[str]) -> tuple[list[Record], list[Record]]:
    """Read a metrics.jsonl as `RunRecords` merges it: records and events. Torn lines are left out, as by `read_lines`.
    Raises UserError that names file and line for an object without a step."""
    run = RunRecords()
    for number, line in read_lines(path):
        if not run.add(line):
            raise UserError(f"{path} line {number}: this is not a metrics record, expected a whole number as `step`")
    return run.records, run.events


def end_of(events: Sequence[Record]) -> Record | None:
    """Return the event of a run's end; None if the run has not ended in good order, or was resumed since."""
    last = next((event for event in reversed(events) if event["event"] in (FINISHED, RESUMED)), None)
    return last if last is not None and last["event"] == FINISHED else None


class RunRecords:
    """Merges the lines of a metrics.jsonl into one record per step. A `resumed` event drops the records of all steps
    after its own, because the resumed run repeated these steps."""

    def __init__(self) -> None:
        self._by_step: dict[int, Record] = {}
        self.events = list[Record]()
        """Lines about something other than a step, in the order of the file."""

    @property
    def records(self) -> list[Record]:
        """One record per step, ascending."""
        return [self._by_step[step] for step in sorted(self._by_step)]

    def add(self, line: Record) -> bool:
        """Merge a line. Returns False, without an effect, for a line that has no step."""
        step = line.get("step")
        if type(step) is not int:
            return False
        if "event" not in line:
            self._by_step.setdefault(step, {}).update(line)
            return True
        self.events.append(line)
        if line["event"] == RESUMED:
            self._by_step = {kept: record for kept, record in self._by_step.items() if kept <= step}
        return True
