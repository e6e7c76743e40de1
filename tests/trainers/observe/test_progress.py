"""Tests the live view, which prints lines without a terminal and a panel on one."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from headrace.trainers.observe import progress
from headrace.trainers.observe.progress import Progress


def figures(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 100, "time/step_s": 0.5, "time/rollout_s": 0.25, "time/train_s": 0.2,
        "rollout/tokens_per_s": 1234.0,
    }  # fmt: skip


SYNC = {
    "queue/groups_in_flight": 0.0, "queue/groups_ready": 0.0, "staleness/mean": 0.0, "staleness/max": 0.0,
    "idle/rollout": 0.5, "idle/train": 0.6, "rollout/groups_dropped": 0.0, "sync/engines_left_out": 0.0,
}  # fmt: skip
ASYNC = {
    "queue/groups_in_flight": 48.0, "queue/groups_ready": 5.0, "staleness/mean": 0.75, "staleness/max": 2.0,
    "idle/rollout": 0.02, "idle/train": 0.31,
}  # fmt: skip


def text_on(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(*steps: dict[str, float], terminal: bool) -> str:
    """Return what a view prints last for these steps, without colours."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=140)
    with Progress("tiny", len(steps), console=console) as progress:
        for number, step in enumerate(steps, start=1):
            progress.update(number, figures(number) | step)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text_on(console))


def run(num_steps: int, *, terminal: bool, enabled: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with Progress("tiny", num_steps, enabled=enabled, console=console, judged="val/exact_match") as progress:
        for done in range(1, 4):
            progress.phase("warm-up", done, 3, f"loss {3 - done}")
        progress.update(0, {"val/exact_match": 0.1})
        for step in range(1, num_steps + 1):
            progress.update(step, figures(step) | ({"val/exact_match": 0.75} if step == 33 else {}))
    return text_on(console)


def test_without_a_terminal_there_are_about_twenty_short_lines() -> None:
    lines = run(200, terminal=False).splitlines()
    steps = [line for line in lines if "] step " in line]
    assert 20 <= len(steps) <= 24
    assert all(line.startswith("[0:") and len(line) < 130 for line in lines)
    [validation] = [line for line in steps if "step 33/200" in line]
    assert "held-out exact match 0.750" in validation and "reward 0.330" in validation
    assert [line.split("] ")[1] for line in lines if "warm-up" in line] == ["warm-up: loss 2", "warm-up: loss 0"]
    assert "left" in steps[-2] and "\x1b" not in "".join(lines)


def test_on_a_terminal_a_panel_shows_step_figures_and_where_time_goes() -> None:
    text = run(40, terminal=True)
    for expected in (
        "step 40/40",
        "held-out exact match",
        "75.0%",
        "rollout 50%",
        "train 40%",
        "other 10%",
        "tokens/s",
    ):
        assert expected in text.replace("\x1b[0m\x1b[1m", "").replace("\x1b[0m", ""), expected


def test_switched_off_it_is_silent() -> None:
    assert run(20, terminal=False, enabled=False) == ""
    assert run(20, terminal=True, enabled=False) == ""


def test_the_panel_goes_away_cleanly_when_the_run_fails() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with pytest.raises(RuntimeError, match="boom"), Progress("tiny", 10, console=console) as progress:
        progress.update(1, figures(1))
        raise RuntimeError("boom")
    assert text_on(console).endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_in_lock_step_shows_no_queue(terminal: bool) -> None:
    text = shown(SYNC, SYNC, terminal=terminal)
    assert "tokens/s" in text
    assert not any(word in text for word in ("in flight", "staleness", "idle", "groups", "engines"))


@pytest.mark.parametrize("terminal", [False, True])
def test_rollouts_ahead_show_how_far_and_who_waits(terminal: bool) -> None:
    text = shown(ASYNC, ASYNC, terminal=terminal)
    for expected in ("groups 48 in flight, 5 ready", "staleness 0.75, at most 2", "idle rollout 2%, train 31%"):
        assert expected in text, expected
    assert all(len(line) <= 160 for line in text.splitlines())


def test_a_streaming_run_shows_idle_shares_as_its_sides_overlap() -> None:
    text = shown(SYNC | {"idle/rollout": 0.3, "idle/train": 0.4}, terminal=False)
    assert "idle rollout 30%, train 40%" in text and "staleness" not in text and "in flight" not in text


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_run_lost_adds_up_and_shows(terminal: bool) -> None:
    lost = SYNC | {"rollout/groups_dropped": 3.0, "rollout/groups_stale": 1.0, "rollout/actors_replaced": 1.0}
    text = shown(lost, lost | {"run/restarts": 1.0, "sync/engines_left_out": 2.0}, terminal=terminal)
    for expected in ("groups dropped 6", "groups too old 2", "actors replaced 1", "restarts 1", "engines left out 2"):
        assert expected in text, expected
    assert "issued again" not in text and "in flight" not in text


def test_a_step_without_a_figure_does_not_spoil_the_average() -> None:
    """The first step of a resumed run generates no tokens when all of its groups come from the journal."""
    text = shown({"rollout/tokens_per_s": float("nan")}, {}, {}, terminal=True)
    assert "nan" not in text and "tokens/s 1,234" in text
    assert "nan" not in shown({"rollout/tokens_per_s": float("nan")}, terminal=False)


def test_lines_also_come_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of many steps prints more than one line in each twentieth of them."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=140)
    with Progress("tiny", 100_000, console=console) as view:
        for step in range(1, 241):
            now[0] += 10.0
            view.update(step, figures(step))
    lines = [line for line in text_on(console).splitlines() if "step " in line]
    assert 35 <= len(lines) <= 45 and "step 1/100000" in lines[0]


@pytest.mark.parametrize("terminal", [False, True])
def test_skipped_steps_are_counted(terminal: bool) -> None:
    assert "steps skipped 2" in shown({"train/skipped": 1.0}, {"train/skipped": 1.0}, {}, terminal=terminal)
    assert "steps skipped" not in shown({"train/skipped": 0.0}, {}, terminal=terminal)


def test_a_long_step_prints_what_it_is_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.05)
    monkeypatch.setattr(progress, "POLL_S", 0.01)
    printed = io.StringIO()
    with Progress("tiny", 100, console=Console(file=printed, width=80)) as view:
        view.doing = lambda: "rollout"
        view.phase("building the actors")
        wait_for(lambda: printed.getvalue().count("building the actors") >= 2)
        view.update(12, figures(12))
        wait_for(lambda: "step 13/100: rollout, for 0:00 so far" in printed.getvalue())
    ended = printed.getvalue()
    time.sleep(0.1)
    assert printed.getvalue() == ended, "nothing is printed after the end"


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_silence_grows_with_the_run_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    view = Progress("tiny", 100, console=Console(file=io.StringIO()))
    for elapsed_s, silent_s, due in ((90, 59, False), (90, 60, True), (8000, 199, False), (8000, 200, True),
                                     (1e6, 599, False), (1e6, 600, True)):  # fmt: skip
        now[0], view._start, view._printed_s = 1e7, 1e7 - elapsed_s, 1e7 - silent_s
        assert view._silent_too_long() is due, (elapsed_s, silent_s)


def test_the_panel_says_what_the_step_is_doing() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Progress("tiny", 10, console=console) as view:
        view.doing = lambda: "logprob"
        view.update(3, figures(3))
    assert "step 3/10  logprob" in text_on(console)


EVALUATED = {
    "val/version": 2.0, "val/reward": 0.5, "val/pass@4": 0.75, "val/failed_rows": 0.0, "eval/minus/avg@4": 0.25,
    "eval/minus/pass@4": 0.625, "eval/minus/response_length_mean": 7.5, "eval/minus/failed_rows": 3.0,
    "eval/minus/step": 1.0, "eval/minus/version_first": 1.0, "eval/minus/seconds": 9.0,
}  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
def test_the_panel_keeps_all_figures_of_an_evaluation(terminal: bool) -> None:
    text = shown({}, EVALUATED, terminal=terminal)
    assert ("evaluation minus  avg@4 0.250  pass@4 0.625  response_length_mean 7.5" in text) == terminal


def test_an_evaluation_has_a_line_with_its_scores_as_soon_as_it_has_ended() -> None:
    console = Console(file=io.StringIO(), width=140)
    with Progress("tiny", 2, console=console) as view:
        view.evaluated(1, {key: value for key, value in EVALUATED.items() if key.startswith("eval/")})
        view.evaluated(2, {"val/reward": 0.5, "val/reward/format": 1, "val/failed_rows": 0, "time/validate_s": 1.26})
    lines = [line.partition("] ")[2] for line in text_on(console).splitlines()]
    assert lines == [
        "evaluation minus of step 1: avg@4 0.250  pass@4 0.625  failed_rows 3  in 9.0 s",
        "validation of step 2: reward 0.500  in 1.3 s",
    ]


def test_the_panel_shows_whether_the_run_learns() -> None:
    health = {
        "reward/std": 0.4321, "reward/flat_groups_share": 0.75, "rollout/truncated_share": 0.125, "train/lr": 1e-6,
        "train/sampled_entropy": 1.25, "logprob/ratio_error": 1.0123, "train/reference_kl": 0.0, "advantage/max": 2.5,
    }  # fmt: skip
    text = shown({}, health, terminal=True)
    for expected in ("reward std 0.432", "groups without signal 75%", "truncated answers 12%", "learning rate 1e-06",
                     "sampled entropy 1.250", "engine mismatch 1.0123", "largest advantage 2.5"):  # fmt: skip
        assert expected in text, expected
    assert "KL to the reference" not in text
    assert "std 0.432" in shown(health, terminal=False)
