"""Engines without a model for tests of environments, rewards and agents, in addition to `ScriptedEngine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..actors.engines.protocol import Completion, SamplingParams
from ..actors.engines.scripted import ScriptedEngine


class TalkingEngine(ScriptedEngine):
    """An engine that answers each turn of an episode with the next text, and records its requests.

        engine = TalkingEngine(tokenizer, "first turn", "second turn")

    A text is encoded letter by letter, as a model can generate it. Code that encodes the text itself then finds other
    tokens. A text that starts with `<`, such as a tool call, is encoded as a whole. After the last text the engine
    begins with the first.
    """

    def __init__(self, tokenizer: Any, *texts: str, **settings: Any) -> None:
        """settings: settings of `ScriptedEngine`, such as `latency_s`."""
        super().__init__(self._say, tokenizer=tokenizer, **settings)
        self._texts = texts
        self.seen: list[tuple[str, list[int], list[int]]] = []
        """Request id, prompt and answer of each completion, as token ids."""

    def _say(self, request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
        turn = request_id.rpartition("/")[2]
        text = self._texts[(int(turn) if turn.isdecimal() else 0) % len(self._texts)]
        pieces = [text] if text.startswith("<") else list(text)
        ids = [token for piece in pieces for token in self._tokenizer(piece, add_special_tokens=False)["input_ids"]]
        return [*ids, self._tokenizer.eos_token_id]

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        completions = await super().generate(request_id, prompt_ids, params)
        self.seen += [(request_id, list(prompt_ids), one.token_ids.tolist()) for one in completions]
        return completions
