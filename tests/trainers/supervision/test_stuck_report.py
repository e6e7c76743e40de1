"""Tests that the place at which an actor hangs is found in its stacks, and told before the actor is ended."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.trainers.supervision import stuck_report
from headrace.trainers.supervision.stuck_report import STUCK, record_stuck, stuck_place

LIBRARY = os.path.dirname(os.__file__)
OWN = Path(stuck_report.__file__).parents[2]
LOOP = f'''  File "{LIBRARY}/asyncio/events.py", line 88 in _run
  File "{LIBRARY}/asyncio/base_events.py", line 1999 in _run_once
  File "{LIBRARY}/asyncio/base_events.py", line 645 in run_forever'''
TOOL = f'''Thread 0x00007f01 (most recent call first):
  File "/home/me/tools.py", line 4 in search
  File "{LIBRARY}/threading.py", line 1012 in run
'''
BLOCKED = f'''{TOOL}
Thread 0x00007f02 (most recent call first):
  File "{LIBRARY}/time.py", line 3 in sleep
  File "/home/me/badenv.py", line 9 in play
  File "{OWN}/actors/environments/host.py", line 120 in run
{LOOP}

Current thread 0x00007f03 (most recent call first):
  File "{LIBRARY}/threading.py", line 1012 in wait
'''


def test_the_place_is_the_users_innermost_line_first_in_the_event_loop() -> None:
    assert stuck_place(BLOCKED) == "badenv.py:9 (play)"
    waits = BLOCKED.replace(f"{LIBRARY}/time.py", f"{LIBRARY}/selectors.py")
    idle = waits.replace('  File "/home/me/badenv.py", line 9 in play\n', "")
    assert stuck_place(idle) == "tools.py:4 (search)", "the loop waits for a tool in a thread"
    assert stuck_place(idle.replace(TOOL, "")) == "", "the loop waits, and nothing says for what"
    library = BLOCKED.replace('  File "/home/me/badenv.py", line 9 in play\n', "").replace(TOOL, "")
    assert stuck_place(library) == "time.py:3 (sleep)"
    assert stuck_place("none: the process is gone") == ""


def hang(folder: Path) -> str:
    return record_stuck(folder, "rollout 0 (pid 7 on here)", os.getpid())


def test_the_stacks_of_a_process_are_kept_in_a_file(tmp_path: Path) -> None:
    stuck_report.answer_with_stacks(tmp_path)
    try:
        place = hang(tmp_path)
    finally:
        stuck_report.stop_answering()
    assert place == f"test_stuck_report.py:{hang.__code__.co_firstlineno + 1} (hang)"
    text = (tmp_path / STUCK).read_text()
    assert "rollout 0 (pid 7 on here) was stuck" in text and 'test_stuck_report.py", line' in text
    assert record_stuck(tmp_path, "rollout 1", os.getpid()) == "", "it answers no longer"
