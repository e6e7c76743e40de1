"""A conversation is one row of an episode, to which the policy and the environment append tokens.

    episode ------ generate, say, add_text -----> row 0        an episode is itself its first conversation
       |-- new_row() --- say(system, summary) --> row 1        compaction, or a sub-agent with a prompt of its own
       +-- branch(turn) --- generate -----------> row 2        repeats the tokens before `turn`, and goes on differently

Tokens are only appended, so a row has exactly the tokens that the engine read and generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..columns import ColumnConfig
from ..engines.chat import ChatFormat, Reply
from ..engines.protocol import Completion, Generator
from ..engines.tokenizer import encode_prompts
from ..images.prompt_pictures import pictures_in
from ..process.user_function_timeouts import UserThreads
from ..protocols import Prompt, Turn
from .turns import Transcript

if TYPE_CHECKING:  # These import transformers, which takes seconds.
    from ..images.preparation import PicturePool
    from ..images.processor import Prepared


@dataclass(frozen=True, slots=True)
class EpisodeServices:
    """Objects that all episodes of a rollout actor share."""

    engine: Generator
    tokenizer: Any
    """Hugging Face tokenizer of the model."""
    chat: Callable[[], ChatFormat]
    """Function that returns the chat format of the model. It raises ValueError if the model has no chat format."""
    threads: UserThreads
    """Threads in which blocking functions of environments run."""
    max_prompt_tokens: int
    """Largest number of tokens of an episode's prompt (`data.max_prompt_tokens`)."""
    columns: Sequence[ColumnConfig] = ()
    """Columns of numbers that the user brings (`data.columns`)."""
    pictures: PicturePool | None = None
    """Pool that preprocesses pictures; None if prompts and messages have none."""

    def showing_chat(self, pictures: Sequence[Prepared], place: str) -> ChatFormat:
        """Return the chat format for messages with these pictures, in order. place: place of the messages, for
        errors."""
        chat, pool = self.chat(), self.pictures
        if not pictures or pool is None:
            return chat
        return chat.showing(partial(pool.processor.expanded, pictures=pictures, place=place))


class RowOwner(Protocol):
    """Protocol of an episode, as its conversations use it."""

    @property
    def name(self) -> str: ...

    @property
    def services(self) -> EpisodeServices: ...

    prompt: Prompt

    def room(self, length: int, num_prompt: int) -> int: ...

    async def take_turn(
        self,
        row: Transcript,
        *,
        stop: Sequence[str] = (),
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> tuple[Completion, Turn]: ...


class Conversation:
    """One row of an episode in progress. Conversations of an episode may take turns at the same time; within one, a
    turn begins after the turn before has ended."""

    def __init__(self, owner: RowOwner | None, text: str = "") -> None:
        """owner: the episode; None for the episode itself. text: the text that the conversation begins with; "" if it
        begins with the first messages of `say`."""
        self._of = owner
        self._text = text
        self._row: Transcript | None = None
        self._turns_here: list[Turn] = []
        """Turns of the policy whose tokens are in the row, those that a branch repeats included."""
        self._awaits_answer = False
        """True in a branch from before an answer, until the policy has answered again."""

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the conversation so far, beginning with its prompt."""
        return self._begun().ids

    @property
    def tokens_left(self) -> int:
        """Number of tokens that the policy and the environment may still add after the prompt."""
        row = self._begun()
        return self._owner.room(len(row), row.num_prompt)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that is to be added, without special tokens."""
        return self._owner.services.tokenizer(text, add_special_tokens=False)["input_ids"]

    def add_text(self, text: str) -> None:
        """Append a text that the policy reads next. Its tokens are not trained on."""
        self.add_tokens(self.encode(text))

    def add_tokens(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy reads next; they are not trained on."""
        self._begun().give(ids)

    async def generate(self, *, stop: Sequence[str] = (), max_new_tokens: int | None = None) -> Turn:
        """Let the policy continue from the tokens so far, and return its turn. The first call continues from the
        prompt.

        stop: texts that end the turn, in addition to those of `rollout.stop`. Such a text stays in the turn.
        max_new_tokens: largest number of tokens of the turn; None allows all tokens that are left. Raises OutOfTokens
        if no token is left, and ValueError if the tokens exceed the model's context.
        """
        _, turn = await self._take_turn(stop=stop, max_new_tokens=max_new_tokens)
        return turn

    async def say(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_new_tokens: int | None = None,
    ) -> Reply:
        """Append chat messages, let the policy answer, and return its answer as a message.

        messages: new messages, in the form of OpenAI's API; the policy's own answers are already included. A branch
        from before an answer takes none: the policy then answers again. A part `{"type": "image", "image": picture}`
        is a picture, as bytes, PIL image or data URI; in a row that begins with these messages, parts without a picture
        get those of the prompt. tools: tools that the policy may call, in the
        same form; pass the same tools in each call. max_new_tokens: largest number of tokens of the answer; None allows
        all tokens that are left. Raises the errors of `generate`, and ValueError if the model's chat format cannot
        continue the tokens so far exactly.
        """
        messages, pictures = await self._shown(messages)
        chat = self._owner.services.showing_chat(pictures, f"episode {self._owner.name!r}")
        if self._row is None:
            self._row = Transcript(chat.render(messages, tools), pictures)
        elif messages:
            if self._awaits_answer:
                raise ValueError(
                    f"episode {self._owner.name!r}: say got {len(messages)} messages in a branch from before an "
                    "answer, expected none, because the policy first answers those that the branch repeats"
                )
            ids = self._row.ids
            start = self._turns_here[-1].start if self._turns_here else len(ids)
            more = chat.extend(ids[:start], ids[start:], messages, tools)
            if more is None:
                raise ValueError(
                    f"episode {self._owner.name!r}: the chat format cannot continue the conversation with messages of "
                    f"the roles {[message.get('role') for message in messages]} without changing earlier tokens"
                )
            self._row.give(more[len(ids) :], pictures)
        completion, _ = await self._take_turn(max_new_tokens=max_new_tokens, stop_token_ids=chat.stop_token_ids)
        return chat.parse(completion.token_ids.tolist(), tools)

    def branch(self, at: Turn | int | None = None) -> Conversation:
        """Return a new row of the episode that begins with the tokens of this one up to a point.

        at: the turn of this row before which the branch begins, or the number of tokens that it repeats; None repeats
        all tokens so far. The policy's tokens among them are trained on in this row only; the data plane stores the
        repeated tokens once. Raises ValueError for a turn of another row, or for more tokens than the row has.
        """
        row = self._begun()
        if isinstance(at, Turn) and at not in self._turns_here:
            raise ValueError(
                f"episode {self._owner.name!r}: branch got a turn of another row, expected one of this row"
            )
        count = len(row) if at is None else at.start if isinstance(at, Turn) else at
        if not 0 < count <= len(row):
            raise ValueError(f"episode {self._owner.name!r}: branch at {count} tokens, expected 1 to {len(row)}")
        branch = Conversation(self._owner)
        branch._row = Transcript(row.ids[:count], self._pictures_within(row.ids[:count]))
        branch._row.num_prompt = min(row.num_prompt, count)
        branch._awaits_answer = isinstance(at, Turn) or (self._awaits_answer and count == len(row))
        branch._turns_here = [turn for turn in self._turns_here if turn.start < count]
        return branch

    # ---------------- These methods are private.

    @property
    def _owner(self) -> RowOwner:
        assert self._of is not None
        return self._of

    @property
    def _prompt_pictures(self) -> Sequence[Prepared]:
        return ()

    def _prompt_ids(self) -> Sequence[int] | np.ndarray:
        """Return the token ids that the conversation begins with."""
        owner = self._owner
        if not self._text:
            raise ValueError(f"episode {owner.name!r}: the new row is empty, expected `say`, or `new_row` with a text")
        return encode_prompts(owner.services.tokenizer, [self._text])[0]

    async def _shown(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], tuple[Prepared, ...]]:
        """Return messages in which `{"type": "image"}` stands for each picture, and the pictures."""
        pool, place = self._owner.services.pictures, f"episode {self._owner.name!r}"
        if pool is not None:
            return await pool.show(messages, place, self._owner.prompt.prepared if self._row is None else ())
        if pictures_in(messages, place)[1]:
            raise ValueError(f"{place}: got messages with pictures while data.images.enabled=false, expected only text")
        return messages, ()

    def _pictures_within(self, ids: Sequence[int]) -> Sequence[Prepared]:
        """Return the pictures of the row whose placeholder tokens are in its first tokens. Raises BadPicture if these
        end within a picture."""
        pool, pictures = self._owner.services.pictures, self._begun().pictures
        return pool.processor.within(ids, pictures, f"episode {self._owner.name!r}") if pool and pictures else ()

    async def _take_turn(self, **options: Any) -> tuple[Completion, Turn]:
        """Let the policy continue from the tokens so far, and append its tokens. options: see `take_turn`."""
        completion, turn = await self._owner.take_turn(self._begun(), **options)
        self._turns_here.append(turn)
        self._awaits_answer = False
        return completion, turn

    def _begun(self) -> Transcript:
        """Return the row, which begins with the prompt."""
        if self._row is None:
            self._row = Transcript(self._prompt_ids(), self._prompt_pictures)
        return self._row
