"""Turns conversations into token ids, and marks the tokens that the assistant must learn to write.

A trained turn has exactly the tokens that a policy generates in an environment: it begins where the chat template asks
for an answer, and ends with the token that ends the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engines.chat_template import apply_chat_template
from ...engines.stop_tokens import EndTokens
from ...engines.tokenizer import encode_prompts


def as_it_is(text: str, whole: bool) -> str:
    """Return a text without a change."""
    return text


@dataclass(frozen=True, slots=True, eq=False)
class TurnTokens:
    """The tokens of one row, of which some are trained on."""

    ids: np.ndarray
    """Token ids: int32 `[L]`."""
    mask: np.ndarray
    """1 where a token is trained on, else 0: uint8 `[L]`. The first token is never trained on, as nothing precedes
    it."""

    @classmethod
    def of(cls, ids: Sequence[int] | np.ndarray, mask: np.ndarray) -> TurnTokens:
        """Return the tokens of a row. mask: bool `[L]`."""
        mask = mask.astype(np.uint8)
        mask[:1] = 0
        return cls(np.asarray(ids, dtype=np.int32), mask)


class TurnMarker:
    """Renders conversations with the chat template of a tokenizer, and finds the assistant's turns in the text."""

    def __init__(self, tokenizer: Any, ends: EndTokens, arguments: Mapping[str, Any]) -> None:
        """ends: tokens that end an answer. arguments: arguments of the chat template. Raises ValueError for an argument
        that the template does not read."""
        template = str(getattr(tokenizer, "chat_template", None) or "")
        if unread := [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", template)]:
            raise ValueError(
                f"sft.chat_template_kwargs: got {unread[0]!r}, expected arguments that the model's chat template reads"
            )
        self._tokenizer = tokenizer
        self._arguments = arguments
        self._ends = [str(text) for text in tokenizer.convert_ids_to_tokens(list(ends.ids))]
        last = (ends.template or ends.tokenizer)[:1]
        self._last = "".join(tokenizer.convert_ids_to_tokens(list(last)))
        """Text that ends an answer after which the chat template writes nothing."""
        self._eos = list(ends.tokenizer[:1])

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        trained: Sequence[int],
        expand: Callable[[str, bool], str] = as_it_is,
    ) -> TurnTokens:
        """Return the tokens of a conversation. trained: indices of the messages to train on, which are the assistant's,
        ascending. expand: changes the text of the beginning of a conversation, or of the whole if its second argument
        is True. Raises ValueError if the template does not take the messages, or if it writes a trained turn in another
        way than a policy would."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(
                "the model's tokenizer has no chat template for messages, expected texts `prompt` and `completion`"
            )
        whole, spans = expand(self._text(messages, tools, prompted=False), True), list[tuple[int, int]]()
        for index in trained:
            before = expand(self._text(messages[:index], tools, prompted=True), False)
            turn = expand(self._text(messages[: index + 1], tools, prompted=False), False)
            if not turn.startswith(before):
                raise ValueError(
                    f"the chat template does not begin message {index} as it asks a policy for it (with "
                    f"{before[-40:]!r}), expected other sft.chat_template_kwargs"
                )
            end = self._end(turn, len(before))
            if not end:  # The template writes no end, so the mark of the next message ends the turn.
                whole = turn + self._last if index == len(messages) - 1 else whole
                mark = max((text for text in self._ends if whole.startswith(turn + text)), key=len, default="")
                turn += mark
                end = len(turn)
            if not whole.startswith(turn[:end]):
                raise ValueError(
                    f"the chat template changes message {index} when others follow, so that the row does not have it "
                    "as a policy would write it, expected sft.turns=each or sft.turns=last"
                )
            spans.append((len(before), end))
        return self._marked(whole[: spans[-1][1]], spans)  # What follows the last turn teaches nothing.

    def _end(self, turn: str, start: int) -> int:
        """Return the place behind the last end token in `turn[start:]`, or 0 if there is none."""
        found = [(turn.rfind(text, start), text) for text in self._ends]
        return max((at + len(text) for at, text in found if at >= 0), default=0)

    def completion(self, prompt: str, completion: str) -> TurnTokens:
        """Return the tokens of a text with its continuation. The continuation and the tokenizer's end token behind it
        are trained on."""
        [front] = encode_prompts(self._tokenizer, [prompt])
        answer = [*self._tokenizer(completion, add_special_tokens=False)["input_ids"]]
        if answer[-1:] != self._eos:
            answer += self._eos
        return TurnTokens.of([*front.tolist(), *answer], np.arange(len(front) + len(answer)) >= len(front))

    def _text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, prompted: bool
    ) -> str:
        return apply_chat_template(self._tokenizer, messages, self._arguments, tools=tools, prompted=prompted)

    def _marked(self, text: str, spans: Sequence[tuple[int, int]]) -> TurnTokens:
        """Tokenise a text, and mark the tokens that begin within one of `spans`, pairs (start, end) of characters."""
        if not self._tokenizer.is_fast:
            raise ValueError("the model's tokenizer does not tell the places of its tokens, expected a fast tokenizer")
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        mask = np.zeros(len(starts), dtype=bool)
        for start, end in spans:
            mask |= (starts >= start) & (starts < end)
        return TurnTokens.of(encoded["input_ids"], mask)
