"""The schedule has every pair at least twice, and the table of pairs says of every other one why it makes no sense."""

from __future__ import annotations

from collections import Counter

from headrace.tests.drills.chaos.faults import FAULTS, NO_SENSE, PAIRS, PROCESSES, more, schedule


def test_every_pair_comes_twice_in_a_run_where_it_exists():
    planned = schedule(3)
    counts = Counter(injury.pair for injuries in planned.values() for injury in injuries)
    assert counts == dict.fromkeys(PAIRS, 2)
    assert sum(counts.values()) >= 60
    assert all(store in injury.pair.stores for store, injuries in planned.items() for injury in injuries)
    assert {store: len(injuries) for store, injuries in planned.items()}.keys() == {"shm", "simple", "tcp"}
    units = [(store, injury.pair.fault) for store, injuries in planned.items() for injury in injuries
             if injury.pair.process == "storage unit"]  # fmt: skip
    assert sorted(units) == [
        (store, fault) for store in ("simple", "tcp") for fault in ("cut", "kill", "slow_store", "stop")
    ]


def test_the_seed_decides():
    assert schedule(3) == schedule(3) != schedule(4)
    assert more("shm", 3, 1) == more("shm", 3, 1) != more("shm", 3, 2)


def test_every_process_and_every_fault_has_a_verdict():
    possible = {(pair.process, pair.fault) for pair in PAIRS}
    assert len({(pair.process, pair.fault, pair.stores) for pair in PAIRS}) == len(PAIRS)
    assert possible | NO_SENSE.keys() == {(process, fault) for process in PROCESSES for fault in FAULTS}
    assert not possible & NO_SENSE.keys()
