"""A session is the part of the endpoint for one episode. It holds the calls, their tokens, and the rows they become.

request -> the same request again? -> join it        prompt = earlier prompt + answer + new messages, if one matches
        -> else a task of its own -> prompt tokens -> engine -> answer -> client still there? -> recorded
                                                                         |  it went away
                                                                         +--> kept for a while for a repeat, then gone
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from ...engines.chat import ChatFormat, Reply
from ...engines.protocol import BadSchema, Which
from ...engines.tokenizer import encode_prompts
from ..episode import Episode, OutOfTokens
from ..turns import Transcript
from .dialects import BadRequest, CallAnswer, CallRequest, Choice, own_cuts

if TYPE_CHECKING:
    from ...images.processor import Prepared  # It imports transformers, which takes seconds.

LINGER_S = 10.0
"""Seconds for which a call is kept after its client has disconnected, so that a repeated request can join it."""
MAX_KEPT = 64
"""Largest number of answered calls of an episode that are kept for repeated requests."""

_THINKING = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
"""Pattern of the reasoning that some clients put in front of an answer's text when they send it back."""
_ANY: Mapping[str, Which] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """An answered call. An agent can wait for its tools for long with many of them, so they hold no texts or tokens."""

    said: bytes
    """Digest of the tools and the messages, or of the text, that were sent, followed by the policy's answer."""
    count: int
    """Number of these messages, or of the characters of the text; 0 for a prompt of token ids."""
    is_chat: bool
    row: Transcript
    end: int
    """Number of tokens in the row once the answer is appended."""
    num_answer: int
    """Number of tokens of the answer."""
    name: str
    """Name under which the call is kept for repeated requests."""
    pictures: tuple[Prepared, ...]
    """Pictures whose placeholder tokens are among those that were sent, in order."""

    @property
    def ids(self) -> list[int]:
        """Token ids that were sent, followed by the policy's answer."""
        return self.row.ids[: self.end]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The tokens of a call's prompt, and the row that it continues."""

    ids: Sequence[int]
    row: Transcript | None
    """Row that the call continues; None if it begins a row."""
    length: int
    """Number of tokens of that row when the prompt was made."""
    num_cached: int = 0
    """Number of the first tokens that an earlier call had already."""
    pictures: tuple[Prepared, ...] = ()
    """Pictures whose placeholder tokens are in `ids`, in order."""


@dataclass(eq=False)
class Call:
    """One call, in progress or answered."""

    digest: str
    name: str
    """Name under which the call is kept for repeated requests: the client's idempotency key, else the digest."""
    request: CallRequest
    task: asyncio.Task[CallAnswer] = field(init=False)
    prompt: _Prompt | None = None
    waiters: int = 0
    recorded: bool = False


class Session:
    """The calls of one episode. Methods run in the endpoint's event loop, which is that of the rollout actor."""

    def __init__(
        self,
        episode: Episode,
        rows: Literal["conversation", "call"],
        models: Mapping[str, Which] = _ANY,
        *,
        own_sampling: bool = False,
    ) -> None:
        """rows: see `EndpointConfig.rows`. models: what the names stand for that calls must give; {} if they can give
        any name. own_sampling: whether requests say from which tokens answers are drawn (`EndpointConfig.sampling`)."""
        self.episode = episode
        self._own_sampling = own_sampling
        self._rows = rows
        self._models = models
        self._recorded: list[_Recorded] = []
        self._stored: dict[str, tuple[Mapping[str, Any], ...]] = {}
        """Id of an answer -> its conversation without instructions, for `previous_response_id`."""
        self._messages: dict[Any, Mapping[str, Any]] = {}
        """Messages of stored conversations, each once, by the form in which they are compared."""
        self._calls: OrderedDict[str, Call] = OrderedDict()
        self._open: set[Call] = set()
        self._lingering: set[asyncio.Task[None]] = set()
        self.num_requests = 0
        """Number of requests whose bodies are being read or which wait for an answer."""
        self.closed = False

    @property
    def num_open(self) -> int:
        """Number of answers that the policy still has to give."""
        return sum(call.request.n for call in self._open if not call.task.done())

    def find(self, key: str, retry: bool, digest: str) -> Call | None:
        """Return the call that a request repeats; None if it does not repeat a call.

        key: the client's idempotency key, "" if there is none. retry: whether the client says that it tries again.
        digest: digest of the request. Raises BadRequest if the key belongs to another request.
        """
        call = self._calls.get(f"key {key}" if key else f"digest {digest}")
        if call is None or not (key or retry):
            return None
        if call.digest != digest:
            raise BadRequest("Idempotency-Key: it belongs to another request", status=409, code="key_in_use")
        failed = call.task.done() and (call.task.cancelled() or call.task.exception() is not None)
        return None if failed else call

    def begin(self, request: CallRequest, key: str, digest: str) -> Call:
        """Begin a new call and start the task that answers it. Raises BadRequest if it names an unknown response."""
        if request.previous:
            before, own = self._stored.get(request.previous), request.num_instructions
            if before is None:
                raise BadRequest(
                    f"previous_response_id: got {request.previous[:80]!r}, expected the id of a stored response of the "
                    "same episode",
                    status=404, code="previous_response_not_found",
                )  # fmt: skip
            request = replace(request, messages=(*request.messages[:own], *before, *request.messages[own:]))
        call = Call(digest, f"key {key}" if key else f"digest {digest}", request)
        call.task = asyncio.create_task(self._answer(call))
        self._open.add(call)
        self._calls[call.name] = call
        self._calls.move_to_end(call.name)
        while len(self._calls) > MAX_KEPT:
            self._calls.popitem(last=False)
        return call

    def leave(self, call: Call) -> None:
        """Record that a client no longer waits for a call. A call is ended after LINGER_S if no client waits for it and
        no client has received its answer."""
        call.waiters -= 1
        if call.recorded:
            self._open.discard(call)
        if call.recorded or call.waiters or self.closed:
            return
        task = asyncio.create_task(self._linger(call))
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    async def _linger(self, call: Call) -> None:
        failed = call.task.done() and not call.task.cancelled() and call.task.exception() is not None
        if not failed and not call.task.cancelled():
            await asyncio.sleep(LINGER_S)
        if call.waiters or call.recorded:
            return
        call.task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await call.task
        self._open.discard(call)
        if self._calls.get(call.name) is call:
            del self._calls[call.name]

    def record(self, call: Call) -> None:
        """Record an answered call as a turn of the episode, right before the answer is sent to its client. A no-op if
        the call is already recorded, or if the episode has ended."""
        if call.recorded or self.closed:
            return
        call.recorded = True
        if self._models.get(call.request.model):
            return  # The policy has not answered.
        answer, prompt, request = call.task.result(), call.prompt, call.request
        assert prompt is not None
        sent = _digests(request)
        for choice in answer.choices:
            row = prompt.row
            if row is None or len(row) != prompt.length:  # There is no row yet, or another answer has continued it.
                row = Transcript(prompt.ids, prompt.pictures)
            else:
                row.give(prompt.ids[len(row) :], prompt.pictures[len(row.pictures) :])
            # The tokens under a schema were drawn from another distribution than the one that is trained.
            self.episode.record(row, choice.completion, choice.text, trained=not request.schema)
            if request.is_chat:
                said, count = _chained(sent[-1], choice.reply.as_message()), len(sent)
            else:
                text = request.prompt + choice.text if isinstance(request.prompt, str) else ""
                said, count = _digest(text), len(text)
            num_answer = len(choice.completion.token_ids)
            kept = _Recorded(said, count, request.is_chat, row, len(row), num_answer, call.name, prompt.pictures)
            self._recorded.append(kept)
        # Only a repeated request reads the call from now on. It has been answered, so its messages are not needed.
        call.prompt, call.request = None, replace(request, messages=request.messages[:1], prompt="")
        if request.store:
            reply = answer.choices[0].reply
            thoughts = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
            said = (*request.messages[request.num_instructions :], {**reply.as_message(), **thoughts})
            self._stored[answer.id] = tuple(self._messages.setdefault(_norm(one), one) for one in said)

    async def count(self, request: CallRequest) -> int:
        """Return the number of tokens that the prompt of a call would have."""
        self._chat_of(request)
        with _refusing(request):
            return len((await self._prompt_of(request)).ids)

    async def close(self) -> None:
        """End the session: calls in flight are ended and not recorded. Idempotent."""
        self.closed = True
        pending: list[asyncio.Task[Any]] = [*(call.task for call in self._open), *self._lingering]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self._open.clear()
        self._calls.clear()

    # ---------------- These methods are private.

    async def _answer(self, call: Call) -> CallAnswer:
        request = call.request
        if self._models and request.model not in self._models:
            expected = " or ".join(map(repr, self._models))
            raise BadRequest(f"model: got {request.model!r}, expected {expected}", status=404, code="model_not_found")
        adapter = self._models.get(request.model, "")
        params = self.episode.params
        repeated = params.temperature if params.mask_limit else None  # Those of evaluations have no masks.
        cuts = own_cuts(request.sampling, repeated) if self._own_sampling else {}
        chat = self._chat_of(request)
        with _refusing(request):
            made = self._rendered(request) if adapter else self._prompt_of(request)
            prompt = call.prompt = await made
            make = partial(self._choice, request, prompt, chat, adapter, cuts)
            choices = [asyncio.create_task(make()) for _ in range(request.n)]
            try:
                answers = tuple(await asyncio.gather(*choices))
            finally:
                for choice in choices:
                    choice.cancel()
                await asyncio.gather(*choices, return_exceptions=True)
        ids = array("i", prompt.ids)  # A list of integers takes nine times as much memory.
        return CallAnswer(self._new_id(), int(time.time()), ids, prompt.num_cached, answers)

    async def _choice(
        self,
        request: CallRequest,
        prompt: _Prompt,
        chat: ChatFormat | None,
        adapter: Which,
        cuts: Mapping[str, Any],
    ) -> Choice:
        """Let the policy answer a call once. cuts: see `own_cuts`."""
        episode = self.episode
        first = prompt.row.num_prompt if prompt.row is not None else len(prompt.ids)
        completion, text = await episode.sample_turn(
            prompt.ids,
            episode.room(len(prompt.ids), first),
            stop=request.stop,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=chat.stop_token_ids if chat else (),
            adapter=adapter,
            schema=request.schema,
            cuts=cuts,
            pictures=tuple(picture.blob for picture in prompt.pictures),
            own_places=() if prompt.row is None else episode.own_places(prompt.row, prompt.length),
        )
        ids, tokens = completion.token_ids.tolist(), []
        if request.logprobs:
            tokens = [episode.services.tokenizer.decode([token]) for token in ids]
        reply, stopped_by = chat.parse(ids, request.tools) if chat else Reply(text), ""
        if completion.finish_reason == "stop":
            reply, stopped_by = _without_stop(reply, request.stop)
        return Choice(completion, text, reply, stopped_by, tokens)

    def _chat_of(self, request: CallRequest) -> ChatFormat | None:
        """Return the chat format that reads the answers to a call; None for a text completion."""
        chat = self.episode.services.chat() if request.is_chat else None
        if request.tools and not (chat and chat.reads_tools):
            raise BadRequest(
                "tools: the model's chat format cannot read calls of tools, expected model.renderer to be set"
            )
        return chat

    async def _prompt_of(self, request: CallRequest) -> _Prompt:
        """Return the tokens of a call's prompt. If the prompt continues an earlier call, its tokens begin with exactly
        the tokens of that call and its answer."""
        sent = _digests(request)
        for call in reversed(self._recorded):
            made = await self._continued(call, request, sent)
            if made is not None:
                if call.name.startswith("digest "):  # The client has the answer, and does not ask for it again.
                    self._calls.pop(call.name, None)
                continues = self._rows == "conversation" and len(call.row) == call.end
                ids, pictures = made
                return _Prompt(ids, call.row if continues else None, call.end, call.end, (*call.pictures, *pictures))
        return await self._rendered(request)

    async def _continued(
        self, call: _Recorded, request: CallRequest, sent: Sequence[bytes]
    ) -> tuple[Sequence[int], tuple[Prepared, ...]] | None:
        """Return the tokens of a request's prompt and its new pictures if the prompt continues `call`, else None. sent:
        digests of the request's messages."""
        if call.is_chat or request.is_chat:
            if not (call.is_chat and len(sent) > call.count + 1 and sent[call.count] == call.said):
                return None
            before = call.ids
            start = call.end - call.num_answer
            messages, pictures = await self._shown(request, call.count)
            chat = self.episode.services.showing_chat(pictures, "messages")
            ids = chat.extend(before[:start], before[start:], messages, request.tools)
            return None if ids is None else (ids, pictures)
        if not isinstance(request.prompt, str):
            before = call.ids
            return (request.prompt, ()) if list(request.prompt[: len(before)]) == before else None
        if call.count and len(request.prompt) >= call.count and _digest(request.prompt[: call.count]) == call.said:
            return [*call.ids, *self.episode.encode(request.prompt[call.count :])], ()
        return None

    async def _rendered(self, request: CallRequest) -> _Prompt:
        """Return the prompt of a call that continues none."""
        services = self.episode.services
        if request.is_chat:
            messages, pictures = await self._shown(request)
            chat = services.showing_chat(pictures, "messages")
            return _Prompt(chat.render(messages, request.tools), None, 0, 0, pictures)
        if isinstance(request.prompt, str):
            (ids,) = encode_prompts(services.tokenizer, [request.prompt])
            return _Prompt(ids.tolist(), None, 0)
        return _Prompt(request.prompt, None, 0)

    async def _shown(
        self, request: CallRequest, first: int = 0
    ) -> tuple[Sequence[Mapping[str, Any]], tuple[Prepared, ...]]:
        """Return the messages from `first` on, and their pictures. In the messages, `{"type": "image"}` stands for each
        picture."""
        messages, pool = request.messages[first:], self.episode.services.pictures
        if all(isinstance(message.get("content"), str) for message in messages):
            return messages, ()
        if pool is None:
            raise BadRequest("messages: got pictures while data.images.enabled=false, expected only texts")
        return await pool.show(messages, "messages")

    def _new_id(self) -> str:
        return f"call-{self.episode.name}-{secrets.token_hex(6)}"


@contextmanager
def _refusing(request: CallRequest) -> Iterator[None]:
    """Turn the errors of a request that does not fit the policy into refusals."""
    try:
        yield
    except BadSchema as error:
        raise BadRequest(f"{request.schema_field}: {error}") from None
    except OutOfTokens as error:
        raise BadRequest(str(error), code="context_length_exceeded") from None
    except ValueError as error:  # The messages do not fit the template, or the prompt does not fit the context.
        raise error if isinstance(error, BadRequest) else BadRequest(str(error)) from None


def _without_stop(reply: Reply, stop: Sequence[str]) -> tuple[Reply, str]:
    """Return a reply up to the stop text that ended it, and this text; "" if none of the texts is in the reply."""
    ends = [(at, text) for text in stop if (at := reply.content.find(text)) >= 0]
    if not ends:
        return reply, ""
    at, text = min(ends)
    return replace(reply, content=reply.content[:at]), text


def digest_of(path: str, body: bytes) -> str:
    """Return the digest by which a repeated request is recognised."""
    return hashlib.sha256(path.encode() + b"\0" + body).hexdigest()


def _digests(request: CallRequest) -> list[bytes]:
    """Return digests of the beginnings of a chat: of its tools alone, with one message, and so on."""
    digests = [_digest(json.dumps(list(request.tools), sort_keys=True))]
    for message in request.messages:
        digests.append(_chained(digests[-1], message))
    return digests


def _chained(before: bytes, message: Mapping[str, Any]) -> bytes:
    return _digest(before.hex() + json.dumps(_norm(message), sort_keys=True, default=str))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _norm(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the parts of a message that must be equal for two messages to count as the same. Clients may send answers
    back with other spacing, another order of keys, or without the reasoning."""
    calls = tuple(
        (call.get("id"), call["function"].get("name"), _canonical(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), Mapping)
    )
    content = message.get("content") or ""
    role = message.get("role")
    if isinstance(content, list):
        content = _digest(json.dumps(content, sort_keys=True)).hex()
    if role == "assistant":
        content = _THINKING.sub("", content).strip()
    return role, content, calls, message.get("tool_call_id")


def _canonical(arguments: Any) -> str:
    try:
        given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        given = str(arguments)
    # The Messages API has only objects, so the dialect wraps other arguments in one.
    if isinstance(given, dict) and list(given) == ["arguments"] and not isinstance(given["arguments"], dict):
        return _canonical(given["arguments"])
    return json.dumps(given, sort_keys=True)
