"""An engine that says given texts, one per turn, and remembers what it was asked."""

from __future__ import annotations

import asyncio

from headrace.actors.engines.protocol import SamplingParams
from headrace.testing import TalkingEngine
from headrace.tests.actors.environments.chat_tokenizer import make_chat_tokenizer


def test_each_turn_has_its_text_letter_by_letter_or_whole() -> None:
    tokenizer = make_chat_tokenizer()
    engine = TalkingEngine(tokenizer, "ab", "<tool_call>ab")

    async def turns() -> list[list[int]]:
        return [
            (await engine.generate(f"e/{turn}", [7], SamplingParams(max_new_tokens=9)))[0].token_ids.tolist()
            for turn in range(3)
        ]

    first, second, third = asyncio.run(turns())
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in (first, second)] == ["ab", "<tool_call>ab"]
    assert len(first) == 3 and len(second) == 3 and third == first, "two letters, or a tag and `ab`; and the end"
    assert engine.seen == [("e/0", [7], first), ("e/1", [7], second), ("e/2", [7], third)]
