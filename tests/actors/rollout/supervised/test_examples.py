"""Lines of a user's file become rows, and each mistake is one sentence with the file and the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.actors.engines.stop_tokens import tokenizer_ends
from headrace.actors.rollout.supervised.config import SftConfig
from headrace.actors.rollout.supervised.examples import Examples
from headrace.actors.rollout.supervised.supervised_rows import HELD_OUT, SupervisedRows
from headrace.actors.rollout.supervised.turn_marks import TurnMarker
from headrace.dataplane.meta import POSITION
from headrace.tests.actors.engines.tokenizer_layouts import LAYOUTS, make_tokenizer, save_config

TOKENIZER = make_tokenizer(LAYOUTS[1])
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
TWO = {"messages": [USER, ASSISTANT, USER, {**ASSISTANT, "content": "hu"}]}


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def texts(config: SftConfig) -> list[list[str]]:
    """The trained tokens of each row, by row, as text."""
    examples, found = Examples(config, validation=False), []
    for index in range(examples.size):
        tokens = examples.tokens(index, TurnMarker(TOKENIZER, tokenizer_ends(TOKENIZER), {}))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.mask, [0]])))
        found.append([TOKENIZER.decode(tokens.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)])
    return found


def test_turns_decide_how_many_rows_a_line_becomes(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", TWO, "\n", {"prompt": "x=", "completion": "y"})
    more = write(tmp_path / "b.jsonl", {"prompt": TWO["messages"][:3], "completion": [ASSISTANT]})
    ends = ["y<|endoftext|>"]
    ho, hu = "ho<|im_end|>", "hu<|im_end|>"
    # The prompt of the last file has a turn of the assistant, too, which is not trained on.
    assert texts(SftConfig(train=[file, more])) == [[ho, hu], ends, [ho]]  # pyright: ignore
    assert texts(SftConfig(train=[file, more], turns="each")) == [[ho], [hu], ends, [ho]]  # pyright: ignore
    assert texts(SftConfig(train=file, turns="last")) == [[hu], ends]  # pyright: ignore


def test_a_long_row_is_refused_or_cut(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", TWO)
    whole = SftConfig(train=file)  # pyright: ignore
    [both] = texts(whole)
    with pytest.raises(ValueError, match=r"^sft.train: line 1 of .*: the row has \d+ tokens, expected at most sft.max"):
        texts(whole.model_copy(update={"max_tokens": 80}))
    cut = whole.model_copy(update={"max_tokens": 80, "overlong": "truncate"})
    assert texts(cut) == [both[:1]]
    with pytest.raises(ValueError, match=r"line 1 of .*: none of the first sft.max_tokens=20 tokens is trained on"):
        texts(cut.model_copy(update={"max_tokens": 20}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{no json\n", r"^sft.train: line 2 of '.*a.jsonl' is not JSON: "),
        ("[1]\n", r"^sft.train: line 2 of '.*a.jsonl' is a list, expected an object"),
        (
            {"text": "x"},
            r"^sft.train: line 2 of '.*': got the columns text, expected `messages`, or `prompt` and `comp",
        ),
        ({"messages": "x"}, "`messages` is a str, expected a list of messages"),
        ({"messages": []}, "`messages` is an empty list, expected a list of messages"),
        ({"messages": [USER]}, "line 2 .*: there is no message of the assistant to train on, expected at least one"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, "message 1 has the role 'bot', expected one of system"),
        ({"messages": [USER, "x"]}, "message 1 is a str, expected `role` and `content`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]},
            "has a part of type 'image', ",
        ),
        ({"messages": [USER, {"role": "assistant"}]}, "message 1 has the content None, expected text"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "a message of the assistant is the first or follows another one"),
        ({"messages": [USER, ASSISTANT], "tools": "x"}, "`tools` is a str, expected a list of declarations"),
        ({"prompt": "a", "completion": ""}, "`completion` is empty, expected a text to train on"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "`prompt` is a str, expected a list of messages"),
    ],
)
def test_a_mistake_is_one_sentence_with_file_and_line(tmp_path: Path, line: Any, message: str) -> None:
    file = write(tmp_path / "a.jsonl", TWO, line)
    with pytest.raises(ValueError, match=message) as caught:
        Examples(SftConfig(train=file), validation=False)  # pyright: ignore
    assert "\n" not in str(caught.value) and "line 2 of" in str(caught.value)


def test_what_is_no_file_of_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got 'a.csv', expected a file that ends in .jsonl or .ndjson"):
        SftConfig(train="a.csv")  # pyright: ignore
    with pytest.raises(ValueError, match=r"sft.validation: .* has no line, expected at least one"):
        Examples(SftConfig(validation=write(tmp_path / "e.jsonl", "\n")), validation=True)
    with pytest.raises(ValueError, match=r"sft.chat_template_kwargs: got 'thinks', expected arguments that the"):
        TurnMarker(TOKENIZER, tokenizer_ends(TOKENIZER), {"thinks": True})


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    model = save_config(LAYOUTS[1], TOKENIZER, tmp_path)
    lines = [{"prompt": "x", "completion": str(number)} for number in range(20)]
    config = SftConfig(
        train=write(tmp_path / "a.jsonl", *lines),  # pyright: ignore
        validation=write(tmp_path / "b.jsonl", {"prompt": "v", "completion": "w"}),
    )
    rows = SupervisedRows(config, TOKENIZER, model, seed=3)
    groups = rows.find_all(range(40))
    ids = [tuple(group.rows.batch.jagged("input_ids").values.tolist()) for group in groups]
    first, second = ids[:20], ids[20:]
    assert sorted(first) == sorted(second) and len(set(first)) == 20 and first != second
    again = SupervisedRows(config, TOKENIZER, model, seed=3).find_all([25, 7])
    assert [tuple(group.rows.batch.jagged("input_ids").values.tolist()) for group in again] == [ids[25], ids[7]]
    assert [group.rows.tags[POSITION].tolist() for group in again] == [[25], [7]]
    assert [group.rows.keys for group in again] == [["p.0"], ["7.0"]]
    [held_out] = rows.find_all([HELD_OUT])
    assert TOKENIZER.decode(held_out.rows.batch.jagged("input_ids").values) == "vw<|endoftext|>"
