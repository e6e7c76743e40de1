"""Over twelve tokenizers' layouts, a supervised row has the tokens and the mask of an episode with the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.actors.engines.chat import build_chat_format
from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.engines.stop_tokens import end_tokens, tokenizer_ends
from headrace.actors.environments.config import EnvironmentConfig
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.protocols import Prompt
from headrace.actors.rollout.supervised.turn_marks import TurnMarker, TurnTokens
from headrace.tests.actors.engines.tokenizer_layouts import LAYOUTS, Layout, make_tokenizer, save_config

ASKED, ANSWERS = ("2 + 2 = é?", "and 3 + 3?"), ("It is 4, é.", "6")
TALK: list[dict[str, Any]] = [
    {"role": role, "content": text}
    for asked, answer in zip(ASKED, ANSWERS, strict=True)
    for role, text in (("user", asked), ("assistant", answer))
]
WRITTEN = {
    "Qwen3": "<think>\n\n</think>\n\n{}<|im_end|>",
    "Mistral v3": " {}</s>",
    "gpt-oss": "<|channel|>final<|message|>{}<|return|>",
}
"""What a policy writes as its answer where that is more than the answer and the end of a turn."""
CHANGING = ("Qwen3", "gpt-oss")
"""Layouts whose template changes a turn when another one follows."""
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.replace(" ", "-"))


def written(layout: Layout, answer: str) -> str:
    return WRITTEN.get(layout.name, "{}" + layout.turn_end).format(answer)


def trained_texts(tokenizer: Any, tokens: TurnTokens) -> list[str]:
    """The text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.mask, [0]])))
    return [tokenizer.decode(tokens.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def played(tokenizer: Any, layout: Layout, asked: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Any, Any]:
    """The tokens and the mask of an episode in which the policy gives ANSWERS."""
    answers = [tokenizer(written(layout, text), add_special_tokens=False)["input_ids"] for text in ANSWERS]
    turns = iter(answers[-len(asked) :])

    async def talk(episode: Episode) -> None:
        for messages in asked:
            await episode.say(messages)

    engine = ScriptedEngine(lambda *_: next(turns), tokenizer=tokenizer)
    host = EpisodeHost(
        talk, EnvironmentConfig(max_rows=1), chat=lambda: build_chat_format(tokenizer, "template", {}, {})
    )
    params = SamplingParams(n=1, max_new_tokens=200)
    [sample] = asyncio.run(host.run(Prompt("p", "", "", {}), engine, tokenizer, params))
    assert not sample.error
    return sample.input_ids.tolist(), sample.response_mask.tolist()


@by_layout
def test_a_row_is_that_of_an_episode_with_the_same_answers(layout: Layout, tmp_path: Any) -> None:
    tokenizer: Any = make_tokenizer(layout)
    marker = TurnMarker(tokenizer, end_tokens(save_config(layout, tokenizer, tmp_path), tokenizer), {})
    if layout.name in CHANGING:
        with pytest.raises(ValueError, match=r"changes message 1 when others follow.*expected sft.turns=each"):
            marker.conversation(TALK, None, (1, 3))
    else:
        tokens = marker.conversation(TALK, None, (1, 3))
        assert (tokens.ids.tolist(), tokens.mask.tolist()) == played(tokenizer, layout, [TALK[:1], TALK[2:3]])
        assert [text.strip() for text in trained_texts(tokenizer, tokens)] == [
            written(layout, answer).strip() for answer in ANSWERS
        ]
    last = marker.conversation(TALK, None, (3,))
    assert (last.ids.tolist(), last.mask.tolist()) == played(tokenizer, layout, [TALK[:3]])
    first = marker.conversation(TALK[:2], None, (1,))
    assert [text.strip() for text in trained_texts(tokenizer, first)] == [written(layout, ANSWERS[0]).strip()]


PIECES = {
    "Llama 3": "{{ m.content | trim }}<|eot_id|>",
    "Gemma 3": "{{ m.content | trim }}<end_of_turn>",
    "Mistral v3": " {{ m.content }}{{ eos_token }}",
    "DeepSeek-V3": "{{ m.content }}<｜end▁of▁sentence｜>",
    "OLMo 2": "{{ m.content }}{{ eos_token }}",
    **dict.fromkeys(("Qwen2.5 base", "Qwen2.5 instruct", "Phi-4", "SmolLM2"), "{{ m.content }}<|im_end|>"),
}
"""What the templates write for an answer, where earlier turns stay and a turn has an end of its own."""


@by_layout
def test_tokens_and_mask_are_those_of_transformers(layout: Layout) -> None:
    """Transformers finds the mask by marks in the template, as TRL trains on."""
    tokenizer: Any = make_tokenizer(layout)
    marker = TurnMarker(tokenizer, tokenizer_ends(tokenizer), {})
    size = len((last := marker.conversation(TALK, None, (3,))).ids) - (layout.name == "GLM-4")
    whole = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=False)
    assert last.ids.tolist()[:size] == whole[:size] and tokenizer.decode(whole[size:]).strip() == ""
    if layout.name not in PIECES:
        return
    tokens, piece = marker.conversation(TALK, None, (1, 3)), PIECES[layout.name]
    inside = f"{{% generation %}}{piece}{{% endgeneration %}}"
    marked = f"{{% if m.role == 'assistant' %}}{inside}{{% else %}}{piece}{{% endif %}}"
    after = "{{ '\\n' }}"  # A line break behind a block would be left out.
    template = tokenizer.chat_template.replace(f"{piece}\n", f"{piece}{after}").replace(piece, marked)
    given = tokenizer.apply_chat_template(
        TALK, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert given["input_ids"] == whole
    assert tokens.mask.tolist() == given["assistant_masks"][: len(tokens.mask)]
    assert not any(given["assistant_masks"][len(tokens.mask) :]) and sum(tokens.mask.tolist()) > 10


def test_a_completion_ends_with_the_end_token_and_follows_its_prompt() -> None:
    tokenizer: Any = make_tokenizer(LAYOUTS[0])
    marker = TurnMarker(tokenizer, tokenizer_ends(tokenizer), {})
    tokens = marker.completion("2+2=", "4")
    begin, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|begin_of_text|>", "<|eot_id|>"))
    text = tokenizer("2+2=4", add_special_tokens=False)["input_ids"]
    assert tokens.ids.tolist() == [begin, *text, end]
    assert tokens.mask.tolist() == [0] * 5 + [1, 1]
    assert marker.completion("2+2=", "4<|eot_id|>").ids.tolist() == tokens.ids.tolist()
    assert TurnMarker(make_tokenizer(LAYOUTS[1]), tokenizer_ends(make_tokenizer(LAYOUTS[1])), {}).completion(
        "", "ab"
    ).mask.tolist() == [0, 1, 1]  # nothing precedes the first token


def test_tools_and_their_results_stand_in_the_row_and_are_not_trained_on() -> None:
    tokenizer: Any = make_tokenizer(LAYOUTS[1])
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "result"},
        TALK[3],
    ]
    marker = TurnMarker(tokenizer, tokenizer_ends(tokenizer), {})
    tokens = marker.conversation(talk, [{"type": "function", "function": {"name": "add"}}], (1, 3))
    assert trained_texts(tokenizer, tokens) == ["<call>add<|im_end|>", "6<|im_end|>"]
    assert '"name": "add"' in tokenizer.decode(tokens.ids)


def test_a_template_that_asks_in_another_way_is_refused() -> None:
    tokenizer: Any = make_tokenizer(LAYOUTS[1])
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    marker = TurnMarker(tokenizer, tokenizer_ends(tokenizer), {})
    with pytest.raises(ValueError, match="does not begin message 1 as it asks a policy for it"):
        marker.conversation(TALK[:2], None, (1,))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template for messages"):
        marker.conversation(TALK[:2], None, (1,))
