"""The host drill decides which host is lost, what the run did, and which promise it broke."""

from __future__ import annotations

import random
from dataclasses import replace

from headrace.tests.drills.hosts.host_drill import SCENES, Event, Result, choose, grid, judged, outcome_of, summarise

PLACES = {
    "host1": [],
    "host2": ["directory", "train worker 0"],
    "host3": ["rollout 0", "train worker 1"],
    "host4": ["rollout 1"],
}
EVENT = Event("rollouts", "host4", "killed", ("rollout 1",), 7, "goes on", 31.5, ())


def test_a_scene_loses_a_host_with_the_processes_that_it_names() -> None:
    dice = random.Random(1)
    assert {choose(PLACES, SCENES["rollouts"], ["host1"], dice) for _ in range(20)} == {"host4"}
    assert {choose(PLACES, SCENES["ranks"], ["host1"], dice) for _ in range(20)} == {"host3"}
    assert {choose(PLACES, SCENES["directory"], ["host1"], dice) for _ in range(20)} == {"host2"}
    assert choose(PLACES, SCENES["engines"], ["host1"], dice) is None
    assert choose(PLACES, SCENES["directory"], ["host1", "host2"], dice) is None


def test_a_run_is_judged_by_what_the_page_allows() -> None:
    assert outcome_of("engine 1 is away", code=None, went_on=True) == "goes on"
    assert outcome_of("restart 1 (run.max_restarts=3): going on", code=None, went_on=True) == "restarts"
    assert outcome_of("", code=None, went_on=False) == "hangs"
    assert outcome_of("", code=1, went_on=True) == "stops"
    assert judged(EVENT, "goes on", None) == []
    [broken] = judged(replace(EVENT, outcome="restarts"), "goes on", None)
    assert broken == "rollouts: host4 killed at step 7: the run restarts, expected that it goes on at worst"
    stopped = replace(EVENT, outcome="stops")
    assert judged(stopped, "stops", None) == [], "the driver was lost with its host"
    assert judged(replace(stopped, sentences=("host host4 is gone",)), "stops", 1) == []
    assert len(judged(stopped, "stops", 2)) == 2, "exit code 2, and no sentence"


def test_figures_and_table_name_each_scene() -> None:
    results = [Result("rollouts", [EVENT, replace(EVENT, outcome="restarts", seconds=60.0)], None, ["a complaint"])]
    figures = summarise(results)
    assert (figures["complaints"], figures["rollouts/events"], figures["rollouts/goes on"]) == (1, 2, 1)
    header, [row] = grid(results)
    assert len(header) == len(row) and row[:3] == ("rollouts", "2", "1")
