"""The ledger finds lost rows, doubled rows and wrong bytes, and knows which steps were undone."""

from __future__ import annotations

from typing import Any

from headrace.tests.drills.chaos.ledger import Balance, balance

FIELDS = ("input_ids", "response_mask", "rollout_logprobs")
Note = dict[str, Any]


class Story:
    """The notes of a run of 2 groups of 2 rows per step, as its processes would write them."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self._place: Note = {}

    def begin(self, step: int, plane: int, partition: str = "train") -> None:
        self._place = {"plane": plane, "partition": partition}
        self._note(begins=step)

    def put(self, *positions: int, digest: str = "") -> None:
        keys = [f"{position}.{sample}" for position in positions for sample in range(2)]
        self._note(putting={name: [digest or f"{name} {key}" for key in keys] for name in FIELDS}, keys=keys)
        self._note(put=True, keys=keys)

    def read(self, *positions: int, digest: str = "") -> list[str]:
        keys = [f"{position}.{sample}" for position in positions for sample in range(2)]
        self._note(read={name: [digest or f"{name} {key}" for key in keys] for name in FIELDS}, keys=keys)
        return keys

    def train(self, step: int, *positions: int, count: bool = True) -> None:
        self._note(trained=step, keys=self.read(*positions))
        if count:
            self._note(committed=step, positions=list(positions))

    def _note(self, **what: Any) -> None:
        self.notes.append({"t": float(len(self.notes)), "pid": 1, **self._place, **what})

    @property
    def balance(self) -> Balance:
        return balance(self.notes, prompts_per_step=2, group_size=2)


def two_steps() -> Story:
    story = Story()
    story.begin(0, 1)
    story.put(0, 1, 2, 3)
    story.train(1, 0, 1)
    story.train(2, 2, 3)
    return story


def test_a_run_without_faults_balances():
    found = two_steps().balance
    assert found.complaints == []
    assert (found.steps, found.undone, found.rows_put, found.rows_trained, found.reads_checked) == (2, 0, 8, 8, 8)


def test_steps_that_were_undone_are_trained_again_and_count_once():
    story = two_steps()
    story.put(4, 5)
    story.train(3, 4, 5, count=False)  # one worker took the step, another died: the driver never counted it
    story.begin(1, 1, "train-1")
    story.put(2, 3, 4, 5)
    story.train(2, 2, 3)
    story.train(3, 4, 5)
    found = story.balance
    assert found.complaints == [] and (found.steps, found.undone, found.epochs) == (3, 1, 2)


def test_a_lost_row_is_found():
    story = two_steps()
    story.put(4, 5, 6)
    story.train(3, 5, 6)  # the group of position 4 was never trained
    found = story.balance
    assert found.lost == ["4.0", "4.1"]
    assert "2 rows were put and lost: 4.0, 4.1" in found.complaints
    story = two_steps()
    trained = next(note for note in story.notes if note.get("trained") == 2)
    trained["keys"] = trained["keys"][1:]
    found = story.balance
    assert found.lost == ["2.0"] and any("step 2 trained 3 rows, the driver counted 4" in line for line in found.odd)


def test_a_doubled_row_is_found():
    story = two_steps()
    story.put(4)
    story.train(3, 3, 4)  # 3 was trained in step 2
    assert story.balance.twice == ["3.0", "3.1"]
    story = two_steps()
    story.put(2)
    assert story.balance.twice == ["2.0", "2.1"], "accepted twice by one partition"


def test_wrong_bytes_are_found():
    story = two_steps()
    story.put(4, 5)
    story.read(4, digest="other")
    story.train(3, 4, 5)
    assert story.balance.wrong == ["4.0", "4.1"]
    story = two_steps()
    story.notes = [note for note in story.notes if "2.0" not in note.get("keys", ()) or "read" not in note]
    assert story.balance.wrong == ["2.0", "2.1", "3.0", "3.1"], "trained without having been read"


def test_rows_of_a_killed_writer_may_be_those_of_any_attempt():
    story = Story()
    story.begin(0, 1)
    story.put(0, digest="first attempt")
    story.notes.pop()  # killed before it could note that the put was done
    story.put(1)
    read = story.read(0, digest="first attempt")
    story.train(1, 1)
    story.notes[-2]["keys"] = [*story.notes[-2]["keys"], *read]
    story.notes[-1]["positions"] = [0, 1]
    assert story.balance.complaints == []


def test_a_history_with_a_gap_is_found():
    story = two_steps()
    story.begin(4, 2)
    story.put(8, 9)
    story.train(5, 8, 9)
    assert any("step 3 was never counted" in line for line in story.balance.odd)
