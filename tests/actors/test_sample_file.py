"""Tests the lines of samples.jsonl: texts of tokens, turns, what both writers keep, and the size of the file."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors import sample_file
from headrace.actors.images.processor import Prepared
from headrace.actors.images.prompt_pictures import Picture
from headrace.actors.protocols import Prompt, Sample, Score
from headrace.actors.sample_file import SampleFile, SamplesConfig, episode_line, token_texts, trained_line


class ByteTokenizer:
    """A tokenizer whose tokens are bytes, so that most characters of other scripts need several."""

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def batch_decode(self, rows: list[list[int]], clean_up_tokenization_spaces: bool) -> list[str]:
        return [self.decode(row, clean_up_tokenization_spaces) for row in rows]


def episode(*turns: tuple[str, str], prompt: str = "Q", finish_reason: str = "stop") -> Sample:
    """Return an episode whose turns are (role, text), each byte a token with a log-prob of -0.1 times its place."""
    ids, mask = list(prompt.encode()), [0] * len(prompt.encode())
    for role, text in turns:
        ids += text.encode()
        mask += [int(role == "policy")] * len(text.encode())
    chosen = np.array(mask, np.uint8)
    return Sample(
        prompt=Prompt("0", prompt, "42", {}),
        index=0,
        input_ids=np.array(ids, np.int32),
        response_mask=chosen,
        logprobs=(-0.1 * np.arange(len(ids)) * chosen).astype(np.float32),
        text=turns[-1][1] if turns else "",
        finish_reason=finish_reason,
        versions=np.where(chosen > 0, 3, -1).astype(np.int32),
    )


SCORE = Score(0.5, {"exact_match": 1.0, "format": 0.0}, valid=True)


def line_of(sample: Sample, max_tokens: int = 100, score: Score = SCORE) -> dict[str, Any]:
    return json.loads(json.dumps(episode_line(ByteTokenizer(), sample, score, "0.0", max_tokens)))


def test_pictures_have_their_names_in_place_of_their_tokens() -> None:
    prepared = [Prepared(cast(Any, None), "<p>" * count, count, 0) for count in (2, 3, 1)]
    given = episode(("policy", "a"), ("environment", "screen <p>!"), prompt="look <p><p><p><p><p> here")
    prompt = replace(given.prompt, pictures=(Picture("line 1", address="a.png"), Picture("line 1, picture 1", b"x")))
    line = line_of(replace(given, prompt=prompt))
    assert line["prompt"] == given.prompt.text, "a prompt whose pictures failed has its text"
    prompt = replace(prompt, prepared=tuple(prepared[:2]))
    line = line_of(replace(given, prompt=prompt, pictures=tuple(prepared)))
    assert line["prompt"] == "look [picture a.png][picture line 1, picture 1] here"
    assert line["turns"][1] == {"role": "environment", "text": "screen [picture of 1 tokens]!"}


@given(st.text(max_size=40))
def test_texts_of_tokens_are_the_text(text: str) -> None:
    data = text.encode("utf-8", "ignore")
    assert "".join(token_texts(ByteTokenizer(), list(data))) == data.decode()


def test_a_character_belongs_to_its_last_token() -> None:
    assert token_texts(ByteTokenizer(), list("a\u00e9b".encode())) == ["a", "", "\u00e9", "b"]


def test_bytes_that_are_no_text_do_not_hold_up_the_rest() -> None:
    texts = token_texts(ByteTokenizer(), [0xFF] * 20 + list(b"end"))
    assert len(texts) == 23 and "".join(texts).endswith("end") and texts[-1] == "d"


def test_an_episode_has_its_turns_rewards_and_facts() -> None:
    line = line_of(episode(("policy", "<tool>"), ("environment", "36"), ("policy", "so 36")))
    assert [(turn["role"], turn["text"]) for turn in line["turns"]] == [
        ("policy", "<tool>"),
        ("environment", "36"),
        ("policy", "so 36"),
    ]
    assert "logprobs" not in line["turns"][1]
    assert line["turns"][0]["lengths"] == [1] * 6 and line["turns"][0]["logprobs"][:2] == [-0.1, -0.2]
    assert line["rewards"] == {"exact_match": 1.0, "format": 0.0} and line["reward"] == 0.5
    assert (line["finish_reason"], line["versions"], line["response_tokens"]) == ("stop", [3, 3], 11)
    assert (line["prompt"], line["answer"], line["set"]) == ("Q", "42", "train")


def test_a_failed_episode_has_its_error_and_no_reward() -> None:
    line = line_of(episode(finish_reason="error"), score=Score(0.0, {}, valid=False, error="it broke"))
    assert (line["turns"], line["reward"], line["error"], line["versions"]) == ([], None, "it broke", [])


@pytest.mark.parametrize("length", [7, 8, 9, 30])
def test_both_writers_leave_out_the_same_tokens(length: int) -> None:
    sample = episode(("policy", "abc"), ("environment", "xy"), ("policy", "0123456789" * 3))
    limit = len(sample.input_ids) - 1 - length
    line = line_of(sample, max_tokens=limit)
    texts = "".join(turn["text"] for turn in line["turns"])
    assert len(texts) == limit and line["tokens_left_out"] == length
    whole = "abcxy" + "0123456789" * 3
    assert texts == whole[: limit - limit // 2] + whole[len(whole) - limit // 2 :]
    engine = [value for turn in line["turns"] for value in turn.get("logprobs", ())]
    trained = trained_line("0.0", 4, 1.25, sample.response_mask, sample.logprobs, limit)
    assert trained["logprobs"] == engine and (trained["step"], trained["advantage"]) == (4, 1.25)


def test_numbers_that_json_lacks_become_null() -> None:
    mask = np.array([0, 1, 1], np.uint8)
    line = trained_line("0.0", 1, float("inf"), mask, np.array([0, np.nan, -1], np.float32), 10)
    assert json.loads(json.dumps(line, allow_nan=False))["logprobs"] == [None, -1.0] and line["advantage"] is None


def file_at(path: Path, **keys: Any) -> SampleFile:
    return SampleFile(str(path / "samples.jsonl"), SamplesConfig(**keys), prompts_per_step=8)


def test_the_first_groups_of_every_nth_step_are_picked(tmp_path: Path) -> None:
    file = file_at(tmp_path, every=3, groups=2)
    assert [position for position in range(60) if file.picks(position)] == [0, 1, 24, 25, 48, 49]


def line_at(step: int, nbytes: int) -> dict[str, Any]:
    position = 8 * step
    uid = np.base_repr(position, 36).lower()
    return {"kind": "episode", "set": "train", "key": f"{uid}.0", "text": "x" * nbytes}


def test_a_full_file_is_thinned_and_keeps_its_first_and_latest_steps(tmp_path: Path) -> None:
    file = file_at(tmp_path, every=1, max_mib=1)
    for step in range(64):
        file.append([line_at(step, 50_000)])
        assert os.path.getsize(file.path) <= 1 << 20
    kept = [int(json.loads(line)["key"][:-2], 36) // 8 for line in Path(file.path).read_text().splitlines()]
    assert kept[0] == 0 and kept[-1] == 63 and kept == sorted(kept)
    assert len([step for step in kept if step < 32]) < len([step for step in kept if step >= 32])


def test_writers_at_the_same_time_lose_no_line(tmp_path: Path) -> None:
    file = file_at(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda step: file.append([line_at(step, 10), line_at(step, 20)]), range(100)))
    lines = [json.loads(line) for line in Path(file.path).read_text().splitlines()]
    assert len(lines) == 200 and len({line["key"] for line in lines}) == 100


def test_a_file_that_cannot_be_written_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_file, "LOCK_S", 0.05)
    file_at(tmp_path / "missing").append([line_at(0, 1)])
    with sample_file._locked(tmp_path / "samples.jsonl.lock"):
        file_at(tmp_path).append([line_at(0, 1)])
    assert len(caplog.records) == 2 and "locked by another process" in caplog.text
    assert not (tmp_path / "samples.jsonl").exists()
