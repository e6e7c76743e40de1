"""Prompts have the same ids, and answers the same end, wherever a policy is asked, over twelve tokenizers' layouts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.engines.chat import TemplateFormat, build_chat_format
from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.engines.stop_tokens import end_note, end_tokens
from headrace.actors.engines.tokenizer import count_tokens, encode_prompts
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.factory import SingleTurn
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.protocols import Prompt
from headrace.actors.rewards.builtin import exact_match
from headrace.actors.rewards.rubric import Rubric
from headrace.actors.rollout.config import RolloutConfig
from headrace.actors.rollout.data_config import DataConfig
from headrace.actors.rollout.prompts import PromptStream, open_prompts, prompt_lengths
from headrace.actors.rollout.worker import HeldOut, RolloutWorker
from headrace.tests.actors.engines.tokenizer_layouts import LAYOUTS, Layout, make_tokenizer, save_config
from headrace.trainers.cluster.rollout_specs import sampling

QUESTION = "2 + 2 = é?"
THINK = "Think. {prompt}"
CHAT = [{"role": "user", "content": QUESTION}]
CHANGING = {"Qwen3", "gpt-oss"}
"""Layouts whose template changes an earlier turn when another one follows."""
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.replace(" ", "-"))


class Recorder(ScriptedEngine):
    """An engine that answers `ok` with the end of a turn, and remembers prompts and stop tokens."""

    def __init__(self, tokenizer: Any, end: str) -> None:
        self.answer = [*tokenizer("ok", add_special_tokens=False)["input_ids"], tokenizer.convert_tokens_to_ids(end)]
        self.asked: list[tuple[list[int], set[int]]] = []
        super().__init__(lambda *_: self.answer, tokenizer=tokenizer)

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        self.asked.append((list(prompt_ids), set(params.stop_token_ids)))
        return await super().generate(request_id, prompt_ids, params)


async def in_environment(episode: Episode) -> None:
    """Ask in messages for a chat, and for a continuation of the prompt otherwise."""
    messages = episode.prompt.messages
    await (episode.say(messages) if messages else episode.generate())


async def over_endpoint(episode: Episode) -> None:
    """Ask as an OpenAI client does, without HTTP."""
    from headrace.actors.environments.endpoint.chat_completions import CHAT, TEXT
    from headrace.actors.environments.endpoint.session import Session

    prompt, session = episode.prompt, Session(episode, "conversation")
    asked: dict[str, Any] = {"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}
    call = session.begin((CHAT if prompt.messages else TEXT).read({"model": "m", **asked}), "", "d")
    await call.task
    await session.close()


async def ask(tokenizer: Any, engine: Recorder, prompts: PromptStream, params: SamplingParams) -> None:
    """Ask for the first prompt in all ways: `single_turn`, an environment, the endpoint and an evaluation."""

    def host(environment: Any) -> EpisodeHost:
        return EpisodeHost(environment, chat=lambda: build_chat_format(tokenizer, "template", {}, {}))

    for environment in (SingleTurn(), in_environment, over_endpoint):
        for sample in await host(environment).run(prompts[0], engine, tokenizer, params):
            assert not sample.error
    rubric = Rubric([("exact_match", exact_match, 1.0)])
    worker = RolloutWorker(
        engine=engine, environment=host(SingleTurn()), tokenizer=tokenizer, rubric=rubric, prompts=prompts,
        held_out={"validation": HeldOut(prompts, 1, rubric, 60.0)}, client=None,  # pyright: ignore
    )  # fmt: skip
    assert (await worker.evaluate("validation", 0, 1, params, 0)).failed == 0


def rendered(tokenizer: Any, messages: Sequence[Any], **arguments: Any) -> list[int]:
    """The ids of a chat in transformers."""
    given = {"add_generation_prompt": True, **arguments}
    return tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **given)


@by_layout
def test_ids_and_ends_are_the_same_wherever_a_policy_is_asked(layout: Layout, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    tokenizer = make_tokenizer(layout)
    ids = tokenizer.get_vocab().__getitem__
    ends = end_tokens(save_config(layout, tokenizer, tmp_path), tokenizer)
    thoughtful = [{"role": "user", "content": THINK.format(prompt=QUESTION)}]
    continued = [*CHAT, {"role": "assistant", "content": "It is"}]
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    cases: list[tuple[Any, dict[str, Any], list[int]]] = [
        (QUESTION, {}, tokenizer(QUESTION)["input_ids"]),
        (QUESTION, {"template": THINK}, tokenizer(thoughtful[0]["content"])["input_ids"]),
        (QUESTION, {"template": THINK, "chat_template": "all"}, rendered(tokenizer, thoughtful)),
        (CHAT, {}, rendered(tokenizer, CHAT)),
        (CHAT, {"template": THINK}, rendered(tokenizer, thoughtful)),
        (continued, {}, rendered(tokenizer, continued, **going_on)),
    ]
    params = sampling(RolloutConfig(stop_token_ids=(7,), max_new_tokens=8), n=1, seed=0)
    named = {layout.eos, layout.turn_end, *(layout.config or "").split()}

    async def main() -> None:
        for number, (prompt, keys, expected) in enumerate(cases):
            file = tmp_path / f"{number}.jsonl"
            file.write_text(json.dumps({"prompt": prompt, "answer": "4"}))
            source = open_prompts(DataConfig(train=str(file), **keys), tokenizer, seed=0, check_lengths=True).source
            engine = Recorder(tokenizer, layout.turn_end)
            await ask(tokenizer, engine, PromptStream(source), params)
            assert [asked for asked, _ in engine.asked] == [expected] * 4
            assert prompt_lengths(source, tokenizer).tolist() == [len(expected)]
            for _, stops in engine.asked:
                assert stops | set(ends.ids) == {7, *map(ids, named)}

    asyncio.run(main())


@by_layout
def test_the_start_says_where_the_files_of_a_model_disagree(layout: Layout, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(layout)
    ends = end_tokens(save_config(layout, tokenizer, tmp_path), tokenizer)
    ids = tokenizer.convert_tokens_to_ids
    assert (ends.tokenizer, ends.template) == ((ids(layout.eos),), (ids(layout.turn_end),))
    note = end_note(ends, tokenizer)
    disagree = layout.name in ("Llama 3", "Qwen2.5 base", "Phi-4", "SmolLM2")
    assert (note is not None) == disagree
    if note is not None:
        config = layout.config and f"{layout.config} ({ids(layout.config)})"
        assert f"(generation config: {config or 'none'}; tokenizer: {layout.eos} ({ids(layout.eos)}); " in note
        assert note.endswith(f"chat template: {layout.turn_end} ({ids(layout.turn_end)}))")


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("named", ["2", ["2"], [[2]], -1, True, 2.0, 10**6])
def test_what_is_no_token_is_no_end(tmp_path: Path, file: str, named: Any) -> None:
    tokenizer = make_tokenizer(LAYOUTS[0])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / file).write_text(json.dumps({"model_type": "llama", "eos_token_id": named}))
    with pytest.raises(ValueError, match=r"^model.path: .*expected (ids of tokens|a model whose configs)") as caught:
        end_tokens(str(tmp_path), tokenizer)
    assert "\n" not in str(caught.value)


@by_layout
def test_the_end_of_a_turn_is_not_doubled_when_a_conversation_goes_on(layout: Layout) -> None:
    """Gemma's tokenizer and template, and GLM's, name different tokens."""
    tokenizer = make_tokenizer(layout)
    end = tokenizer.get_vocab()[layout.turn_end]
    chat, answer = TemplateFormat(tokenizer, {}), Recorder(tokenizer, layout.turn_end).answer
    more = chat.extend(chat.render(CHAT), answer, CHAT)
    assert (more is None) == (layout.name in CHANGING)
    if more is not None:
        whole = rendered(tokenizer, [*CHAT, {"role": "assistant", "content": "ok"}, *CHAT])
        assert more.count(end) == whole.count(end) and more[-8:] == whole[-8:]
    assert chat.parse(answer).content.strip() == "ok"


def test_a_text_gets_no_end_and_no_second_beginning() -> None:
    from tokenizers import processors

    layout = LAYOUTS[0]
    tokenizer = make_tokenizer(layout)
    begin, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|begin_of_text|>", "<|eot_id|>"))
    bare = tokenizer("2+2=", add_special_tokens=False)["input_ids"]
    for single, front in ((f"{layout.front} $A <|eot_id|>", [begin]), ("$A <|eot_id|>", [])):
        added = [(layout.front, begin), ("<|eot_id|>", end)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=added)
        texts = ["2+2=", f"{layout.front}2+2=", "2+2="]
        rows = [row.tolist() for row in encode_prompts(tokenizer, texts, [False, False, True])]
        assert rows == [[*front, *bare], [begin, *bare], bare]
        assert count_tokens(tokenizer, texts, [False, False, True]).tolist() == list(map(len, rows))


def test_a_renderer_refuses_to_continue_a_message() -> None:
    pytest.importorskip("renderers")
    from headrace.tests.actors.environments.chat_tokenizer import make_chat_tokenizer

    chat = build_chat_format(make_chat_tokenizer(), "qwen3", {}, {})
    with pytest.raises(ValueError, match="messages: got a last message of the assistant, expected one of another role"):
        chat.render([*CHAT, {"role": "assistant", "content": "It is"}])


def test_a_template_without_a_message_of_the_user_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(LAYOUTS[1])
    for prompt, message in (
        ([{"role": "system", "content": "s"}], "data.template: got .* line 1 of .* has no message of the user"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "data: line 1 of .* a part of type 'image' while data.images.enabled=false, expected only text",
        ),
    ):
        (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "4"}))
        with pytest.raises(ValueError, match=message):
            open_prompts(
                DataConfig(train=str(tmp_path / "p.jsonl"), template=THINK), tokenizer, seed=0, check_lengths=False
            )
    assert Prompt("0", "t", "", {}).rendered is False
