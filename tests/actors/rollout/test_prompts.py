"""Tests of prompts: files, data sets and tasks, mixtures of them, and the stream that maps positions to them."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.actors.engines.tokenizer import count_tokens, encode_prompts
from headrace.actors.protocols import Prompt
from headrace.actors.rewards.config import RewardConfig
from headrace.actors.rewards.rubric import build_rubric
from headrace.actors.rollout.data_config import DataConfig
from headrace.actors.rollout.prompt_sources import TaskSource, is_held_out
from headrace.actors.rollout.prompts import (
    BLOCK,
    MixedSource,
    PromptStream,
    base36,
    check_prompt_lengths,
    open_prompts,
    open_source,
    shares,
    without_overlong,
)

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    "{% if not thinking | default(true) %}<quick>{% endif %}"
)


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return str(path)


def test_reverse() -> None:
    source = TaskSource("reverse", held_out=False, seed=1)
    lengths = set()
    for index in range(300):
        row = source.row(index)
        digits = row.text[1:-1]
        assert row.text[0] == "r" and row.text[-1] == "=" and digits.isdigit() and row.answer == digits[::-1]
        lengths.add(len(digits))
    assert lengths == {3, 4, 5, 6, 7, 8}


def test_arithmetic() -> None:
    source = TaskSource("arithmetic", held_out=False, options={"max_digits": 3})
    for index in range(100):
        row = source.row(index)
        left, right = row.text.removesuffix("=").split("+")
        assert row.answer == str(int(left) + int(right)) and len(left) <= 3


def test_held_out_prompts_are_never_trained_on() -> None:
    train, held_out = (TaskSource("reverse", held_out=flag, seed=0) for flag in (False, True))
    seen = {train.row(index).text for index in range(3000)}
    kept = {held_out.row(index).text for index in range(500)}
    assert not seen & kept and all(map(is_held_out, kept)) and len(kept) > 400
    assert {TaskSource("reverse", held_out=False, seed=s).row(0).text for s in range(5)}.isdisjoint(kept)


def test_tasks_are_functions_of_seed_and_index() -> None:
    texts = [[TaskSource("reverse", held_out=False, seed=s).row(i).text for i in range(20)] for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("revers", {}, "no built-in task 'revers', expected one of reverse, arithmetic; did you mean 'reverse'"),
        ("reverse", {"max_digit": 3}, "has no 'max_digit'.*did you mean 'max_digits'"),
        ("reverse", {"max_digits": "3"}, "data.options.max_digits: got '3', expected a whole number"),
        ("reverse", {"min_digits": 9}, "min_digits=9, expected at most max_digits=8"),
    ],
)
def test_task_mistakes_get_one_sentence(task: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(DataConfig(train=f"task:{task}", options=options))


def test_jsonl_with_template_and_other_columns(tmp_path: Path) -> None:
    rows = [{"q": f"what is {i}?", "a": i, "hint": "{braces}", "tests": [i]} for i in range(5)] + [
        {"q": "é\u2028", "a": None, "hint": "", "tests": []}
    ]
    config = DataConfig(
        train=jsonl(tmp_path / "p.jsonl", rows), prompt_field="q", answer_field="a", template="{hint} Q: {prompt}\nA:"
    )
    source = open_source(config)
    assert source.size == 6
    row = source.row(3)
    assert row.text == "{braces} Q: what is 3?\nA:" and row.answer == "3"
    assert row.fields == {"hint": "{braces}", "tests": [3]}
    assert source.row(5).text == " Q: é\u2028\nA:" and source.row(5).answer == ""


def test_dataset_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"]})
    table.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(str(tmp_path / "dict"))
    assert open_source(DataConfig(train=str(tmp_path / "plain"))).row(1).answer == "4"
    assert open_source(DataConfig(train=str(tmp_path / "dict"), split="test")).row(0).text == "2+2="
    with pytest.raises(ValueError, match="has no split 'dev', expected one of train, test"):
        open_source(DataConfig(train=str(tmp_path / "dict"), split="dev"))


def held_out(config: DataConfig) -> tuple[str, str | None]:
    """Text of the first validation prompt, and the notes for the user."""
    opened = open_prompts(config, None, seed=0, check_lengths=False, held_out="validation")
    return opened.source.row(0).text, " ".join(opened.notes) or None


def saved(folder: Path, *splits: str) -> str:
    datasets = pytest.importorskip("datasets")
    tables = {split: datasets.Dataset.from_dict({"prompt": [f"{split} q"], "answer": ["1"]}) for split in splits}
    datasets.DatasetDict(tables).save_to_disk(str(folder))
    return str(folder)


def test_validation_never_reads_the_training_split_unasked(tmp_path: Path) -> None:
    both = saved(tmp_path / "both", "train", "test")
    text, note = held_out(DataConfig(train=both, validation=both))
    assert text == "test q" and note == (
        f"validation reads the split 'test' of {both} (data.validation_split is not set)"
    )
    three = saved(tmp_path / "three", "train", "test", "validation")
    assert held_out(DataConfig(train=three, validation=three))[0] == "validation q"
    assert held_out(DataConfig(train=three, validation_split="test")) == ("test q", None)
    alone = saved(tmp_path / "alone", "train")
    with pytest.raises(ValueError, match="which is also data.train, has no split validation or test beside"):
        held_out(DataConfig(train=alone, validation=alone))
    with pytest.raises(ValueError, match="no split validation or test beside the one that is trained on"):
        held_out(DataConfig(train=both, validation=both, split="test"))
    text, note = held_out(DataConfig(train=alone, validation_split="train"))
    assert text == "train q" and note is not None and note.startswith("validation reads the prompts that are trained")
    with pytest.raises(ValueError, match="data.validation_split: .* has no split 'dev', expected one of train, test"):
        held_out(DataConfig(train=both, validation_split="dev"))


def test_another_dataset_s_validation_split_is_chosen_and_told(tmp_path: Path) -> None:
    train, other = saved(tmp_path / "train", "train"), saved(tmp_path / "other", "train", "test")
    assert held_out(DataConfig(train=train, validation=other))[0] == "test q"
    assert held_out(DataConfig(train=other, validation=train))[0] == "train q", "its only split, another's prompts"
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "answer": "b"}])
    assert held_out(DataConfig(train=train, validation=file)) == ("a", None)
    with pytest.raises(ValueError, match="data.validation_split: got 'test', but .* is a file, expected it unset"):
        held_out(DataConfig(train=train, validation=file, validation_split="test"))


def configurations(folder: Path) -> str:
    """A folder with two configurations, as openai/gsm8k has on the hub."""
    pytest.importorskip("datasets")
    lines = ["---", "configs:"]
    for name in ("main", "socratic"):
        (folder / name).mkdir(parents=True)
        lines.append(f"- {{config_name: {name}, data_files: [")
        for split in ("train", "test"):
            jsonl(folder / name / f"{split}.jsonl", [{"prompt": f"{name} {split}", "answer": "1"}])
            lines[-1] += f"{{split: {split}, path: {name}/{split}.jsonl}}, "
        lines[-1] += "]}"
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return str(folder)


def test_a_configuration_of_a_dataset_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = configurations(tmp_path / "gsm8k")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(ValueError, match="data.subset: not set, but .* several configurations: .*main.*socratic"):
        open_source(DataConfig(train=source))
    with pytest.raises(ValueError, match="data.subset: got 'mian', which .* does not have"):
        open_source(DataConfig(train=source, subset="mian"))
    config = DataConfig(train=source, validation=source, subset="socratic")
    assert open_source(config).row(0).text == "socratic train"
    assert held_out(config)[0] == "socratic test"
    other = DataConfig(train=source, validation=source, subset="main", validation_subset="socratic")
    assert held_out(other)[0] == "socratic test"
    with pytest.raises(ValueError, match="data.subset: got 'main', but .* has no configurations"):
        open_source(DataConfig(train=saved(tmp_path / "saved", "train"), subset="main"))


def test_texts_become_messages_and_a_system_prompt_is_put_before_them(tmp_path: Path, tokenizer: Any) -> None:
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = CHAT
    messages = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "2+2", "answer": "4"},
        {"prompt": messages, "answer": ""},
        {"prompt": messages[1:], "answer": ""},
    ]

    def texts(count: int = 3, **options: Any) -> list[str]:
        source = jsonl(tmp_path / "p.jsonl", rows[:count])
        opened = open_source(DataConfig(train=source, **options), chatty)
        found = [opened.row(index).text for index in range(count)]
        assert [row.text for row in opened.rows(0, count)] == found
        return found

    assert texts() == ["2+2", "<system>mine<user>hi<bot>", "<user>hi<bot>"], "a text is the input as it is by default"
    assert texts(chat_template="all", template="Q: {prompt}")[0] == "<user>Q: 2+2<bot>"
    assert texts(chat_template="all", system_prompt="be brief") == [
        "<system>be brief<user>2+2<bot>",
        "<system>mine<user>hi<bot>",
        "<system>be brief<user>hi<bot>",
    ]
    assert texts(chat_template="all", chat_template_kwargs={"thinking": False})[0] == "<user>2+2<bot><quick>"
    with pytest.raises(ValueError, match="data.chat_template_kwargs: got 'thinkin', expected arguments that"):
        texts(chat_template="all", chat_template_kwargs={"thinkin": False})
    with pytest.raises(ValueError, match="data.system_prompt: got 'be brief', but the prompt of line 1 of .* is text"):
        texts(system_prompt="be brief")
    chatty.chat_template = None
    with pytest.raises(ValueError, match="line 1 of .*: data.chat_template is all, but .* no chat template"):
        texts(1, chat_template="all")
    with pytest.raises(ValueError, match="line 2 of .*: the prompt is chat messages, but .* no chat template"):
        texts(2)


def test_prompts_that_are_too_long_are_dropped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "1" * length, "answer": ""} for length in (3, 9, 4, 12, 10, 8)]
    train = jsonl(tmp_path / "p.jsonl", rows)
    other = jsonl(tmp_path / "v.jsonl", rows[:2])
    config = DataConfig(train=train, validation=other, max_prompt_tokens=8, overlong_prompts="drop")
    opened = open_prompts(config, tokenizer, seed=0, check_lengths=False)
    assert opened.source.size == 3 and [opened.source.row(index).text for index in range(3)] == ["111", "1111", "1" * 8]
    assert [row.text for row in opened.source.rows(1, 3)] == ["1111", "1" * 8]
    held_out = open_prompts(config, tokenizer, seed=0, check_lengths=False, held_out="validation")
    assert held_out.source.size == 1
    assert (*opened.notes, *held_out.notes) == (
        f"3 of 6 training prompts of {train} are left out, as they have more than data.max_prompt_tokens=8 tokens",
        f"1 of 2 validation prompts of {other} are left out, as they have more than data.max_prompt_tokens=8 tokens",
    )
    with pytest.raises(ValueError, match="got 2, but all 6 prompts of .* are longer, the shortest has 3 tokens"):
        without_overlong(open_source(config), tokenizer, 2)
    strict = config.model_copy(update={"overlong_prompts": "error"})
    with pytest.raises(ValueError, match="these prompts are longer: line 2 of .*; data.overlong_prompts=drop leaves"):
        open_prompts(strict, tokenizer, seed=0, check_lengths=True)


def test_an_answer_is_found_in_its_column(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "answer": "4 - 1 = <<4-1=3>>3 #### 3\n#### 1,200 "}, {"prompt": "q", "answer": "none"}]
    source = open_source(DataConfig(train=jsonl(tmp_path / "p.jsonl", rows), answer_pattern="#### (.+)"))
    assert source.row(0).answer == "1,200", "the last match counts"
    with pytest.raises(ValueError, match=r"data.answer_pattern: .* does not match the answer of line 2 .* 'none'"):
        source.row(1)
    for wrong in ("####", "(a)(b)", "("):
        with pytest.raises(ValueError, match="expected a regular expression"):
            DataConfig(answer_pattern=wrong)


def test_tokens_are_counted_as_prompts_are_encoded(tokenizer: Any) -> None:
    beginning = copy.deepcopy(tokenizer)
    beginning.bos_token = beginning.eos_token
    texts = ["12+30=", "", beginning.eos_token + "77", "r48213="]
    for each in (tokenizer, beginning):
        assert count_tokens(each, texts).tolist() == [len(ids) for ids in encode_prompts(each, texts)]


@pytest.mark.parametrize(
    ("name", "rows", "change", "message"),
    [
        ("e.jsonl", [], {}, "is empty, expected at least one row"),
        (
            "c.jsonl",
            [{"promt": "a", "answer": "b"}],
            {},
            "data.prompt_field: line 1 .* has no column 'prompt'; it has promt, answer; did you mean 'promt'",
        ),
        ("a.jsonl", [{"prompt": "a"}], {}, "data.answer_field: line 1 .* has no column 'answer'"),
        (
            "t.jsonl",
            [{"prompt": "a", "answer": ""}],
            {"template": "{question}"},
            "data.template: '{question}' does not fit line 1 of",
        ),
        ("n.jsonl", [{"prompt": 3, "answer": ""}], {}, "line 1 of .*, column 'prompt': the prompt is 3, expected text"),
        (
            "l.jsonl",
            [{"prompt": "a", "answer": ["b"]}],
            {},
            "line 1 of .*, column 'answer': the answer is a list, expected",
        ),
        ("o.jsonl", [[1]], {}, "line 1 of .* is a list, expected an object"),
        ("x.txt", [{}], {}, "expected one that ends in .jsonl"),
    ],
)
def test_bad_data_gets_one_sentence(tmp_path: Path, name: str, rows: list, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(DataConfig(train=jsonl(tmp_path / name, rows), **change))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        open_source(DataConfig(train=str(tmp_path / "missing.jsonl")))
    with pytest.raises(ValueError, match="expected task:NAME, a .jsonl file or a folder that exists"):
        open_source(DataConfig(train=str(tmp_path / "missing")))
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')
    with pytest.raises(ValueError, match="line 2 of .* is not JSON"):
        open_source(DataConfig(train=str(tmp_path / "broken.jsonl")))


# ---------------------------------------------------------------- the stream


def test_stream_goes_through_epochs_each_in_its_own_order(tmp_path: Path) -> None:
    source = open_source(
        DataConfig(train=jsonl(tmp_path / "p.jsonl", [{"prompt": f"{i}", "answer": ""} for i in range(50)]))
    )
    stream, twin = PromptStream(source, seed=3), PromptStream(source, seed=3)
    texts = [stream[position].text for position in range(150)]
    assert texts == [twin[position].text for position in reversed(range(150))][::-1]
    epochs = [texts[start : start + 50] for start in (0, 50, 100)]
    assert all(sorted(map(int, epoch)) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and texts != [PromptStream(source, seed=4)[p].text for p in range(150)]
    assert [PromptStream(source, shuffle=False)[p].text for p in (0, 1, 49, 50)] == ["0", "1", "49", "0"]


def test_uids_are_the_positions_in_base_36() -> None:
    stream = PromptStream(TaskSource("reverse", held_out=False))
    uids = [stream[position].uid for position in (0, 35, 36, 1295, 1296)]
    assert uids == ["0", "z", "10", "zz", "100"]
    assert [int(base36(number), 36) for number in range(5000)] == list(range(5000))
    assert PromptStream(TaskSource("reverse", held_out=True), uid_prefix="val-")[36].uid == "val-10"


def test_prompts_longer_than_the_context_are_named_at_the_start(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "1" * n, "answer": ""} for n in (3, 9, 4, 12, 10, 11)]
    source = open_source(DataConfig(train=jsonl(tmp_path / "p.jsonl", rows)))
    assert check_prompt_lengths(source, tokenizer, 12) == 12
    with pytest.raises(
        ValueError,
        match=r"got 8, but .* longer: line 2 .*? \(9 tokens\), line 4 .*? \(12 tokens\), line 5 .* and 1 more",
    ):
        check_prompt_lengths(source, tokenizer, 8)
    assert check_prompt_lengths(TaskSource("reverse", held_out=False), tokenizer, 20) == 10


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def mixture(*sources: dict, **keys: object) -> DataConfig:
    return DataConfig.model_validate({"train": "mixture", "mixture": sources, **keys})


def opened(config: DataConfig, seed: int = 0, held_out: str | None = None) -> PromptStream:
    source = open_prompts(config, None, seed=seed, check_lengths=False, held_out=held_out).source
    return PromptStream(source, seed=seed)


def test_each_source_has_its_share_and_its_own_columns(tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", *({"q": f"{n}?", "level": n} for n in range(7)))
    plain = write(tmp_path / "plain.jsonl", {"prompt": "p", "answer": "a", "data_source": "mine"})
    config = mixture(
        {"source": few, "prompt_field": "q", "answer_field": "", "template": "Q {prompt}", "weight": 3},
        {"source": plain},
        {"source": "task:reverse", "options": {"max_digits": 3}, "weight": 4},
    )
    prompts = [opened(config)[position] for position in range(2 * BLOCK)]
    counts = Counter(prompt.fields["data_source"] for prompt in prompts[:BLOCK])
    assert counts == {few: 375, "mine": 125, "task:reverse": 500}
    levels = [prompt.fields["level"] for prompt in prompts if prompt.text.startswith("Q ")]
    assert all(sorted(levels[at : at + 7]) == list(range(7)) for at in range(0, 749, 7))  # epochs, none left out
    assert len({tuple(levels[at : at + 7]) for at in range(0, 70, 7)}) > 1  # each in another order
    tasks = [prompt.text for prompt in prompts if prompt.text.startswith("r")]
    alone = TaskSource("reverse", held_out=False, options={"max_digits": 3})
    assert tasks == [row.text for row in alone.rows(0, 1000)]
    assert len({prompt.uid for prompt in prompts}) == len(prompts)


def test_a_prompt_is_a_function_of_its_position_and_the_seed() -> None:
    config = mixture({"source": "task:reverse"}, {"source": "task:arithmetic"})
    backwards = opened(config)
    texts = [backwards[position].text for position in reversed(range(5 * BLOCK // 2))][::-1]
    forwards, other = opened(config), opened(config, seed=1)
    assert texts == [forwards[position].text for position in range(5 * BLOCK // 2)]
    kinds = [[stream[position].text[0] == "r" for position in range(50)] for stream in (forwards, other)]
    assert kinds[0] != kinds[1] and 10 < sum(kinds[0]) < 40


def test_validation_reads_the_held_out_parts() -> None:
    config = mixture({"source": "task:reverse"}, {"source": "task:arithmetic"})
    train, held = opened(config), opened(config, held_out="validation")
    assert config.generated and not {train[n].text for n in range(300)} & {held[n].text for n in range(300)}


def test_what_cannot_be_mixed_is_said(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.jsonl", {"prompt": "p", "answer": "a"})
    with pytest.raises(ValueError, match="expected at least one"):
        mixture()
    with pytest.raises(ValueError, match="the source 'mixture'"):
        mixture({"source": "mixture"})
    with pytest.raises(ValueError, match="greater than 0"):
        mixture({"source": plain, "weight": 0})
    with pytest.raises(ValueError, match="weight 1 for 'task:reverse', expected at least 1/1000"):
        opened(mixture({"source": "task:reverse"}, {"source": plain, "weight": 5000}))
    with pytest.raises(ValueError, match="no column 'question'"):
        opened(mixture({"source": "task:reverse"}, {"source": plain, "prompt_field": "question"}))
    assert not mixture({"source": "task:reverse"}, {"source": plain}).generated


def test_shares_add_up_and_are_the_nearest() -> None:
    assert shares([1, 1, 1], 10).tolist() == [4, 3, 3]
    assert shares([2.5, 0.1], 1000).tolist() == [962, 38]
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights = rng.uniform(0.1, 5, rng.integers(1, 9))
        counts = shares(weights.tolist(), BLOCK)
        assert counts.sum() == BLOCK and (np.abs(counts - weights / weights.sum() * BLOCK) < 1).all()


def test_the_order_is_found_without_reading_what_stands_before() -> None:
    class Far:
        def __init__(self) -> None:
            self.read: list[int] = []

        def __getitem__(self, position: int):  # noqa: ANN204
            self.read.append(position)
            return PromptStream(TaskSource("reverse", held_out=False))[0]

    streams = [Far(), Far()]
    source = MixedSource(["a", "b"], streams, [1, 3], seed=0)  # pyright: ignore[reportArgumentType]
    source.row(10**9)
    [place] = streams[0].read + streams[1].read
    assert place // 250_000_000 in (1, 3) or place in range(250_000_000, 750_000_500)


def test_every_tenth_task_of_an_environment_is_held_out() -> None:
    config = DataConfig(train="environment")
    train, held_out = open_source(config), open_source(config, validation=True)
    trained = [train.row(index).fields["task"] for index in range(90)]
    validated = [held_out.row(index).fields["task"] for index in range(10)]
    assert sorted(trained + validated) == list(range(100)) and validated == list(range(9, 100, 10))
    assert [row.text for row in train.rows(9, 11)] == ["10", "11"] and train.size is None and config.generated


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # cellpylib's, at the first import of reasoning_gym
def test_tasks_of_reasoning_gym_are_scored_by_it() -> None:
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = DataConfig(train="reasoning-gym:chain_sum", options=options)
    source, again = open_source(config, seed=3), open_source(config, seed=3)
    rows = [source.row(index) for index in range(5)]
    assert rows == [again.row(index) for index in range(5)] != [open_source(config, seed=4).row(i) for i in range(5)]
    assert open_source(config, seed=3, validation=True).row(0) != rows[0]
    rubric = build_rubric(RewardConfig.model_validate({"functions": [{"kind": "reasoning_gym"}]}))
    for row in rows:
        prompt = Prompt("p", row.text, row.answer, row.fields)
        assert rubric.score(prompt, f" {row.answer}\n", "stop").reward == 1.0
        assert rubric.score(prompt, "many", "stop").reward < 0.1
    wrong = rubric.score(Prompt("p", "1+1", "2", {}), "2", "stop")
    assert not wrong.valid and "does not come from reasoning-gym" in wrong.error
    with pytest.raises(ValueError, match="no data set 'chain_summ'; did you mean 'chain_sum'"):
        open_source(DataConfig(train="reasoning-gym:chain_summ"))
    with pytest.raises(ValueError, match=r"data.options: .* do not fit reasoning-gym:chain_sum"):
        open_source(DataConfig(train="reasoning-gym:chain_sum", options={"terms": 1}))
