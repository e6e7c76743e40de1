"""Shows a run's progress live, as a panel on a terminal or as short lines elsewhere."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...actors.rollout.evaluation_metrics import REWARD
from .metrics import (
    HEALTH,
    evaluation_figures,
    evaluation_text,
    evaluation_title,
    judged_format,
    judged_label,
    time_split,
)

COLOURS = {
    "rollout": "bright_blue",
    "data wait": "bright_red",
    "log-probs": "magenta",
    "train": "bright_green",
    "sync": "yellow",
    "switch": "cyan",
    "other": "bright_black",
}
"""Stage -> colour of its part of the time bar."""

SMOOTHING = 0.2
"""Weight of the newest step in the running averages of metrics."""

LOSSES = (
    ("groups dropped", "rollout/groups_dropped", True),
    ("groups too old", "rollout/groups_stale", True),
    ("groups issued again", "rollout/groups_reissued", True),
    ("steps skipped", "train/skipped", True),
    ("actors replaced", "rollout/actors_replaced", False),
    ("restarts", "run/restarts", False),
    ("engines left out", "sync/engines_left_out", False),
)
"""Failures that a run survives, such as dropped groups and replaced actors, as (label, metric key, whether the value
counts a single step and must be summed). A failure is shown if its count is above 0."""

LINE_EVERY_S, LONGEST_SILENCE_S, SILENT_SHARE = 60.0, 600.0, 1 / 40
"""Limits on the time without output of a run without a terminal. After this many seconds without output,
the run prints a line: SILENT_SHARE times the seconds since its start, but at least LINE_EVERY_S and at most
LONGEST_SILENCE_S."""

POLL_S = 1.0
"""Seconds between two checks whether a line is due."""

_ONLY_IF_NOT_0 = {"rollout/failed_rows", *(key for _, key, _ in HEALTH)}
"""Metrics that the panel leaves out while they are 0."""
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40


class Progress:
    """Context manager that displays the metrics of each step, live or as lines."""

    def __init__(
        self,
        title: str,
        num_steps: int,
        *,
        enabled: bool = True,
        console: Console | None = None,
        judged: str = REWARD,
    ) -> None:
        """Prepare the display of a run of `num_steps` steps. Without a terminal, it prints about twenty lines over the
        run, one for each validation, and during long steps further lines by time (see LINE_EVERY_S). judged: key of the
        metric that `validation.metric` names."""
        self.doing: Callable[[], str] = lambda: ""
        """Function that returns what the run is doing now, such as the stage of its step; "" if it is not known."""
        self._title = title
        self._judged = judged
        self._num_steps = num_steps
        self._enabled = enabled
        # A notebook gets plain lines: rich would space them out there, and its output says that it is a terminal.
        plain = False if Console().is_jupyter else None
        self._console = console or Console(force_jupyter=plain, force_terminal=plain)
        self._line_every = max(1, num_steps // 20)
        self._start = self._printed_s = self._step_s = time.monotonic()
        self._ended = threading.Event()
        self._clockwork: threading.Thread | None = None
        """Thread that prints lines by time, for a display without a terminal."""
        self._phase = "starting"
        self._phase_share: float | None = None
        self._step = 0
        self._first_step: tuple[int, float] | None = None
        self._metrics: dict[str, float] = {}
        self._rewards: list[float] = []
        self._lost: dict[str, float] = {}
        """Counts so far of the failures in LOSSES: label -> count."""
        self._ahead = self._overlapping = False
        """Whether rollouts have run ahead of training so far, and (`_overlapping`) whether they have overlapped with
        it."""
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._enabled and self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()
        elif self._enabled:
            self._clockwork = threading.Thread(target=self._print_by_time, name="progress lines", daemon=True)
            self._clockwork.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._clockwork is not None:
            self._clockwork.join()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str, done: int = 0, total: int = 0, note: str = "") -> None:
        """Show the phase of the run outside its steps, such as starting, warm-up or saving. done, total: progress
        within the phase, not shown if `total` is 0."""
        new = name != self._phase.partition(":")[0]
        if new:
            self._step_s = time.monotonic()
        self._phase = f"{name}: {note}" if note else name
        self._phase_share = done / total if total else None
        if self._enabled and self._live is None and (new or (total and done == total)):
            self._print(self._phase)

    def update(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show the metrics of `step` (0 before the first step)."""
        self._phase, self._phase_share, self._step = "training", None, step
        self._step_s = time.monotonic()
        if step and self._first_step is None:
            # The estimate leaves out the first step, because that step includes one-time work.
            self._first_step = (step, time.monotonic())
        for key, value in metrics.items():
            # A step may lack a figure, such as tokens per second when all its groups come from the journal.
            if value is None or not math.isfinite(value):
                continue
            old = self._metrics.get(key)
            smooth = key.startswith(("time/", "idle/")) or key == "rollout/tokens_per_s"
            self._metrics[key] = value if old is None or not smooth else old + SMOOTHING * (value - old)
        for label, key, per_step in LOSSES:
            value = metrics.get(key)
            if value is not None:
                self._lost[label] = value + (self._lost.get(label, 0.0) if per_step else 0.0)
        self._ahead |= any(metrics.get(key) for key in ("queue/groups_in_flight", "staleness/max"))
        self._overlapping |= self._ahead or _overlap(metrics)
        reward = metrics.get("reward/mean")
        if reward is not None:
            self._rewards.append(reward)
        validated = self._judged in metrics
        due = step % self._line_every == 0 or step == 1 or self._silent_too_long()
        if self._enabled and self._live is None and (validated or due):
            self._print(self._line(metrics))

    def evaluated(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Print a line for an evaluation that has ended. step: step of the policy that it measured. metrics: its
        metrics, and none of other sets."""
        for prefix in evaluation_figures(metrics) if self._enabled else ():
            seconds = metrics.get(f"{prefix}/seconds", metrics.get("time/validate_s"))
            took = f"  in {seconds:.1f} s" if seconds is not None else ""
            scores = evaluation_text(prefix, metrics, brief=True)
            self._print(f"{evaluation_title(prefix)} of step {step}: {scores}{took}")

    def message(self, text: str) -> None:
        """Print a line, which on a terminal appears above the panel."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    # ---------------- These private methods print plain lines.

    def _print(self, text: str) -> None:
        self._printed_s = time.monotonic()
        self._console.print(
            f"[{_clock(time.monotonic() - self._start)}] {text}", markup=False, highlight=False, soft_wrap=True
        )

    def _silent_too_long(self) -> bool:
        now = time.monotonic()
        bound_s = min(max(LINE_EVERY_S, SILENT_SHARE * (now - self._start)), LONGEST_SILENCE_S)
        return now - self._printed_s >= bound_s

    def _print_by_time(self) -> None:
        """Print a line whenever the run has printed nothing for too long, until the display ends."""
        while not self._ended.wait(POLL_S):
            if self._silent_too_long():
                self._print(f"{self._where()}, for {_clock(time.monotonic() - self._step_s)} so far")

    def _where(self) -> str:
        """Return the current activity of the run. It is the step in progress and its stage, or the phase outside the
        steps."""
        if self._phase != "training":
            return self._phase
        stage = self.doing()
        return f"step {self._step + 1}/{self._num_steps}" + (f": {stage}" if stage else "")

    def _line(self, metrics: Mapping[str, float | None]) -> str:
        parts = [f"step {self._step}/{self._num_steps}"]
        for label, key, form in (
            ("reward", "reward/mean", ".3f"),
            ("std", "reward/std", ".3f"),
            (judged_label(self._judged), self._judged, ".3f"),
            ("loss", "train/loss", ".4f"),
            ("s/step", "time/step_s", ".2f"),
            ("tokens/s", "rollout/tokens_per_s", ",.0f"),
        ):
            value = metrics.get(key)
            if value is not None and math.isfinite(value):
                parts.append(f"{label} {value:{form}}")
        parts += [f"{label} {values}" for label, values in (*self._flow(), *self._losses())]
        left = self._left_s()
        return "  ".join(parts + ([f"left {_clock(left)}"] if left is not None else []))

    def _flow(self) -> list[tuple[str, str]]:
        """Return (label, text) pairs for the queue, the staleness and the idle shares. Empty for a run in which
        rollouts and training take turns."""
        if not self._overlapping:
            return []
        metrics = self._metrics
        flight, ready = (metrics.get(f"queue/groups_{state}", 0.0) for state in ("in_flight", "ready"))
        mean, most = (metrics.get(f"staleness/{name}", 0.0) for name in ("mean", "max"))
        idle = [f"{side} {metrics[key]:.0%}" for side in ("rollout", "train") if (key := f"idle/{side}") in metrics]
        queue = ("groups", f"{flight:.0f} in flight, {ready:.0f} ready")
        staleness = ("staleness", f"{mean:.2g}, at most {most:.0f}")
        return [*((queue, staleness) if self._ahead else ()), *([("idle", ", ".join(idle))] if idle else [])]

    def _losses(self) -> list[tuple[str, str]]:
        return [(label, f"{count:.0f}") for label, count in self._lost.items() if count]

    def _left_s(self) -> float | None:
        """Estimate the seconds until the last step ends, from the average time of all steps but the first. None before
        the second step has ended."""
        if self._first_step is None or self._step <= self._first_step[0]:
            return None
        first, since = self._first_step
        return (time.monotonic() - since) / (self._step - first) * (self._num_steps - self._step)

    # ---------------- These private methods draw the panel.

    def _render(self) -> Panel:
        share = self._phase_share if self._phase_share is not None else self._step / self._num_steps
        left = self._left_s()
        clock = f"{_clock(time.monotonic() - self._start)} elapsed" + (f", {_clock(left)} left" if left else "")
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1, no_wrap=True)
        head.add_column(justify="right", no_wrap=True)
        stage = self.doing()
        where = f"step {self._step}/{self._num_steps}" + (f"  {stage}" if stage else "")
        where = where if self._phase == "training" else self._phase
        head.add_row(Text(where, style="bold"), Text(clock, style="dim"))
        bar = Table.grid(expand=True)  # The bar is in a table, because a bare ProgressBar does not end its line.
        bar.add_row(
            ProgressBar(total=1.0, completed=share, complete_style="bright_green", finished_style="bright_green")
        )
        rows: list[RenderableType] = [head, bar]
        if self._metrics:
            rows.append(self._metric_table())
            for line in (self._flow(), self._losses()):
                cells = [Text.assemble((f"{label} ", "dim"), (values, "bold")) for label, values in line]
                rows += [Text("   ").join(cells)] if cells else []
        if len(self._rewards) > 1:
            rows.append(Text.assemble(("reward ", "dim"), (_sparkline(self._rewards), "bright_blue")))
        for prefix in evaluation_figures(self._metrics):
            rows.append(Text.assemble((f"{evaluation_title(prefix)}  ", "dim"), evaluation_text(prefix, self._metrics)))
        rows += self._time_bar()
        return Panel(Group(*rows), title=Text(self._title, style="bold"), title_align="left", border_style="dim")

    def _metric_table(self) -> Table:
        table = Table.grid("", "", "", padding=(0, 3))
        cells = []
        for label, key, form in (
            ("reward", "reward/mean", ".3f"),
            (judged_label(self._judged), self._judged, judged_format(self._judged)),
            ("response tokens", "rollout/response_length_mean", ".1f"),
            ("tokens/s", "rollout/tokens_per_s", ",.0f"),
            ("s/step", "time/step_s", ".2f"),
            ("failed rows", "rollout/failed_rows", ".0f"),
            *HEALTH,
        ):
            value = self._metrics.get(key)
            if value is not None and (value or key not in _ONLY_IF_NOT_0):
                cells.append(Text.assemble((f"{label} ", "dim"), (f"{value:{form}}", "bold")))
        for at in range(0, len(cells), 3):
            table.add_row(*cells[at : at + 3])
        return table

    def _time_bar(self) -> list[Text]:
        """Return a bar that divides the time of a step among its stages by colour, and the legend of the bar. Empty if
        no times are known."""
        split = {stage: seconds for stage, seconds in time_split(self._metrics).items() if seconds > 0}
        width, total = max(20, self._console.width - 4), sum(split.values())
        bar, legend, at, drawn = Text(no_wrap=True), Text(), 0.0, 0
        for stage, seconds in split.items():
            at += seconds
            end = round(width * at / total)
            bar.append("━" * (end - drawn), style=COLOURS[stage])
            drawn = end
            legend.append("■ ", style=COLOURS[stage]).append(f"{stage} {seconds / total:.0%}  ", style="dim")
        return [bar, legend] if split else []


def _overlap(metrics: Mapping[str, float | None]) -> bool:
    """Return whether rollouts and training overlapped in a step, so whether their idle shares add up to less than 1."""
    rollout, train = metrics.get("idle/rollout"), metrics.get("idle/train")
    return rollout is not None and train is not None and rollout + train < 1


def _sparkline(values: list[float]) -> str:
    """Draw all values as bars in at most SPARK_WIDTH characters. Each character shows the mean of consecutive values,
    scaled between the lowest and the highest mean."""
    count = min(SPARK_WIDTH, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in means)


def _clock(seconds: float) -> str:
    """Format seconds as `4:05`, or as `1:02:03` from an hour on."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
