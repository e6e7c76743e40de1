"""Rows that are no prompts are refused with their file, line and column, and not rendered as empty prompts."""

from __future__ import annotations

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.rollout.data_config import DataConfig, SourceConfig
from headrace.actors.rollout.prompt_rows import check_rows
from headrace.actors.rollout.prompt_sources import PromptRows, load_rows, validation_note
from headrace.actors.rollout.prompts import check_prompt_lengths, open_source

CHATML = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<bot>"
GOOD = {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4"}


@pytest.fixture
def chatty(tokenizer: Any) -> Any:
    """A tokenizer whose chat template renders what is missing as nothing, as most do."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHATML
    return tokenizer


def message(**keys: Any) -> str:
    """A row whose prompt is one message."""
    return json.dumps({"prompt": [keys], "answer": "4"})


USER = {"role": "user"}
BAD = {
    message(**{"from": "human", "value": "2+2="}): "message 1 has the keys `from` and `value` of ShareGPT",
    message(content="2+2="): "message 1 has the keys content, expected text in `role`",
    message(role=3, content="2+2="): "message 1 has the keys role, content, expected text in `role`",
    message(role="human", content="2+2="): "message 1 has the role 'human', expected 'user'",
    message(role="\ud83d", content="2+2="): r"message 1: got the character '\ud83d', half of a surrogate pair",
    message(**USER): "message 1 of the role 'user' has nothing as `content`, expected text",
    message(**USER, content=None): "message 1 of the role 'user' has None as `content`, expected text",
    message(**USER, content=""): "message 1 of the role 'user' has '' as `content`, expected text",
    message(**USER, content=4): "message 1 of the role 'user' has 4 as `content`, expected text",
    message(**USER, content=[]): "message 1 of the role 'user' has [] as `content`, expected text",
    message(**USER, text="2+2="): "message 1 of the role 'user' has nothing as `content`, expected text",
    message(role="assistant", tool_calls=[]): "message 1 of the role 'assistant' has nothing as `content`",
    message(**USER, content=["2+2="]): "message 1 has the part '2+2=', expected one with a `type`",
    message(**USER, content=[{"type": "text"}]): "message 1 has a part of type text without text in `text`",
    message(**USER, content=[{"type": "text", "text": "2"}]): "the chat template takes no lists as `content`",
    message(**USER, content="\ud83d"): r"message 1: got the character '\ud83d', half of a surrogate pair",
    '{"prompt": ["2+2="], "answer": "4"}': "message 1 is '2+2=', expected a message such as",
    '{"prompt": [], "answer": "4"}': "the prompt is [], expected text or a list of chat messages",
    '{"prompt": {"role": "user"}, "answer": "4"}': "the prompt is {'role': 'user'}, expected text or a list",
    '{"prompt": "", "answer": "4"}': "the prompt is '', expected text or a list of chat messages",
    '{"prompt": NaN, "answer": "4"}': "the prompt is nan, expected text or a list of chat messages",
    '{"prompt": "\\ud800", "answer": "4"}': r"column 'prompt': got the character '\ud800'",
    '{"prompt": "2+2=", "answer": "\\udfff"}': r"column 'answer': got the character '\udfff'",
    json.dumps({"prompt": json.dumps(GOOD["prompt"]), "answer": "4"}): "column 'prompt': the chat messages are stored",
    json.dumps({"prompt": f" {GOOD['prompt']!r}", "answer": "4"}): "expected a list of messages (json.loads of",
    json.dumps({"prompt": '[{"from": "human", "value": "2"}]', "answer": "4"}): "the chat messages are stored as text",
    '{"prompt": "2+2=", "answer": true}': "column 'answer': the answer is True, expected text or a number",
    '{"prompt": "2+2=", "answer": NaN}': "column 'answer': the answer is nan, expected text or a finite number",
    '{"prompt": "2+2=", "answer": -Infinity}': "column 'answer': the answer is -inf, expected text or a finite number",
    '{"prompt": "2+2=", "answer": {"a": 1}}': "column 'answer': the answer is a dict, expected text or a number",
    '{"prompt": "2+2=", "answer": 1' + "0" * 5000 + "}": "is not JSON: Exceeds the limit (4300 digits)",
    '{"prompt": "2+2=", "answer": ' + "[" * 5000 + "}": "is not JSON: ",
}  # fmt: skip


def refusal(path: Path, line: str, tokenizer: Any, **keys: Any) -> tuple[str, str]:
    """The sentences about a line behind a good one and a blank one, with a tokenizer and without."""
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n", encoding="utf-8")
    config = DataConfig(train=str(path), **keys)
    with pytest.raises(ValueError) as caught:
        check_prompt_lengths(open_source(config, tokenizer), tokenizer, 512)
    without = ""
    try:
        check_rows(config, load_rows(config), 10)
    except ValueError as error:
        without = str(error)
    return str(caught.value), without


@pytest.mark.parametrize(("line", "words"), BAD.items(), ids=range(len(BAD)))
def test_what_is_no_prompt_is_refused(tmp_path: Path, chatty: Any, line: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    for sentence in refusal(path, line, chatty, system_prompt="Be brief.", chat_template="all"):
        if sentence or "takes no lists" not in words:  # The template is not known without the tokenizer.
            assert words in sentence and sentence.startswith(f"data: line 3 of {str(path)!r}") and "\n" not in sentence


def test_text_of_another_column_is_checked_too(tmp_path: Path, chatty: Any) -> None:
    line = '{"prompt": "2+2=", "answer": "4", "hint": "\\ud800"}'
    (tmp_path / "p.jsonl").write_text(line)
    config = DataConfig(train=str(tmp_path / "p.jsonl"), template="{hint} {prompt}")
    with pytest.raises(ValueError, match=r"^data: line 1 of '.*p.jsonl', column 'prompt': got the character '\\ud800'"):
        open_source(config, chatty)


def test_good_rows_of_every_kind_are_taken(tmp_path: Path, chatty: Any) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    system, tool, user = ({"role": role, "content": role} for role in ("system", "tool", "user"))
    rows = [
        *({"prompt": "2+2=", "answer": answer} for answer in (None, "", 4, 4.5, 7.0)),
        {"prompt": [{**system, "content": ""}, user, call, tool], "answer": "4"},
        {"prompt": [system, {**user, "name": "me"}, {"role": "assistant", "content": ""}, user], "answer": "4"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\ufeff" + "\r\n".join(map(json.dumps, rows)), encoding="utf-8")  # An editor of Windows wrote it.
    config = DataConfig(train=str(path))
    source = open_source(config, chatty)
    assert [source.row(index).answer for index in range(5)] == ["", "", "4", "4.5", "7"]
    assert source.row(6).text == "<system>system<user>user<assistant><user>user<bot>"
    check_rows(config, load_rows(config), 100)
    chatty.chat_template = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
    path.write_text(message(**USER, content=[{"type": "text", "text": "2+2="}]))
    assert open_source(config, chatty).row(0).text == "2+2="


QWEN = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
    "{% elif m.role == 'tool' %}<tool>{{ m.content | tojson }}{% elif m.role == 'html' %}{{ m.content | e }}"
    "{% elif m.role == 'one_line' %}{{ m.content.split() | join(' ') }}{% endif %}{% endfor %}<bot>"
)
"""A template that knows some roles, and writes each in its own way."""


def test_a_message_that_the_template_leaves_out_is_refused(tmp_path: Path, chatty: Any) -> None:
    def opened(*messages: dict[str, Any], template: str = QWEN, **keys: Any) -> str:
        chatty.chat_template = template
        (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": messages, "answer": "4"}))
        return open_source(DataConfig(train=str(tmp_path / "p.jsonl"), **keys), chatty).row(0).text

    text = 'Say "é"\n  <b> & go\n'
    for role in ("system", "user", "tool", "html", "one_line"):
        assert opened({"role": role, "content": text}, {"role": "user", "content": "2+2="})
    for role in ("developer", "User", "user "):
        missing = (
            f"column 'prompt': message 2 of the role {role!r} is missing from the text of the chat template, expected"
        )
        with pytest.raises(ValueError, match=missing):
            opened({"role": "user", "content": "2+2="}, {"role": role, "content": "Be brief."}, system_prompt="Hi.")
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(
        ValueError, match=r"^data.system_prompt: line 1 of .*: the message of the role 'system' is miss"
    ):
        opened({"role": "user", "content": "2+2="}, template=users, system_prompt="Be brief.")
    with pytest.raises(ValueError, match="message 1 of the role 'user' is missing"):
        opened({"role": "user", "content": "2+2="}, template="123")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "2+2=", "answer": "4"}))
    with pytest.raises(ValueError, match="message 1 of the role 'user' is missing"):
        open_source(DataConfig(train=str(tmp_path / "p.jsonl"), chat_template="all"), chatty)
    thought = {"role": "assistant", "content": "<think>no</think>Yes"}
    left_out = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    user = {"role": "user", "content": "ab"}
    assert opened(user, thought, user, template=left_out) == "abYesab"


def test_an_absent_content_is_not_written_as_none(tmp_path: Path, chatty: Any) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    for message in (call, {**call, "content": ""}):
        row = {
            "prompt": [{"role": "user", "content": "None?"}, message, {"role": "tool", "content": "4"}],
            "answer": "",
        }
        (tmp_path / "p.jsonl").write_text(json.dumps(row))
        if message is call:
            with pytest.raises(
                ValueError, match="template writes None for a message without content, expected an empty"
            ):
                open_source(DataConfig(train=str(tmp_path / "p.jsonl")), chatty)
        else:
            assert open_source(DataConfig(train=str(tmp_path / "p.jsonl")), chatty).row(0).text.count("None") == 1


@pytest.mark.parametrize("template", ["", "x", "{{prompt}}", "{prompt.__class__}", "{prompt[0]}", "{a[b].c}"])
def test_a_template_without_a_column_is_refused(template: str) -> None:
    for make in (DataConfig, partial(SourceConfig, source="a/b")):
        with pytest.raises(ValueError, match=re.escape(f"got {template!r}, expected")):
            make(template=template)


def test_a_template_takes_parts_of_mappings_but_no_characters(tmp_path: Path) -> None:
    config = DataConfig(train=str(tmp_path / "p.jsonl"), template="{a[b.c]} {prompt}")
    (tmp_path / "p.jsonl").write_text('{"prompt": "2", "answer": "", "a": {"b.c": 1}}')
    assert open_source(config).row(0).text == "1 2"
    config = DataConfig(train=str(tmp_path / "p.jsonl"), template="{a[0]} {prompt}")
    (tmp_path / "p.jsonl").write_text('{"prompt": "2", "answer": "", "a": "text"}')
    with pytest.raises(ValueError, match="takes a character of the column 'a' of line 1 of"):
        open_source(config)


@pytest.mark.parametrize("pattern", [r"(x)?", r"#### (.*)"])
def test_an_empty_match_is_no_answer(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "2", "answer": "4 #### "}')
    with pytest.raises(ValueError, match=r"data.answer_pattern: .* finds an empty text in the answer of line 1"):
        open_source(DataConfig(train=str(tmp_path / "p.jsonl"), answer_pattern=pattern))


def test_validation_on_a_copy_of_the_training_file_is_told(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("train.jsonl", "copy.jsonl", "other.jsonl")]
    for file, digit in zip(files, "223", strict=True):
        file.write_text(f'{{"prompt": "{digit}", "answer": ""}}')
    train, copied, other = map(str, files)
    config = DataConfig(train=train, validation=copied)
    note = validation_note(config, load_rows(config, validation=True))
    assert note == f"validation reads a copy of the prompts that are trained on: {copied} is equal to {train}"
    config = DataConfig(train=train, validation=other)
    assert validation_note(config, load_rows(config, validation=True)) is None


def test_rows_of_a_data_set_are_counted_as_it_counts_them() -> None:
    table = PromptRows("org/data", [{"prompt": "a"}, {"prompt": "b", "answer": 1}])
    with pytest.raises(ValueError, match=re.escape("data.answer_field: row 0 (counted from 0) of 'org/data' has no")):
        check_rows(DataConfig(train="org/data"), table, 2)
    with pytest.raises(ValueError, match="'org/data' is empty"):
        check_rows(DataConfig(train="org/data"), PromptRows("org/data", []), 2)
