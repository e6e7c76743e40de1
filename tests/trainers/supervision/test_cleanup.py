"""Tests of when a process counts as ended."""

from __future__ import annotations

import pytest

from headrace.dataplane.owned_folder import process_start
from headrace.tests.process_pool import has_ended, zombie_with_a_thread
from headrace.trainers.supervision.cleanup import is_running


@pytest.mark.processes
def test_a_zombie_has_ended_with_its_last_thread() -> None:
    """Until then it keeps its files and its memory, on a GPU, too."""
    with zombie_with_a_thread() as child:
        assert process_start(child.pid) is not None and is_running(child.pid) and not has_ended(child.pid)
        child.communicate("end\n")
    assert process_start(child.pid) is None and not is_running(child.pid) and has_ended(child.pid)
