"""Calls in threads all run, also where no thread can be started, and keep their errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.codecs.threads import run_in_threads


def test_calls_return_in_order_with_their_errors() -> None:
    first, second, third = run_in_threads([lambda: 1, lambda: 1 // 0, lambda: 3], 2)
    assert (first.result(), third.result()) == (1, 3)
    with pytest.raises(ZeroDivisionError):
        second.result()
    assert run_in_threads([], 2) == []


AT_THE_END = """
import threading, time
from headrace.codecs.threads import run_in_threads

def late():
    threading.main_thread().join()
    time.sleep(0.1)
    first, second = run_in_threads([lambda: 7, lambda: 1 // 0], 2)
    print(first.result(), type(second.exception()).__name__)

threading.Thread(target=late).start()
"""


@pytest.mark.processes
def test_calls_run_while_the_interpreter_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "7 ZeroDivisionError\n", ended.stderr
