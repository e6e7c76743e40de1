"""Calls methods of an actor from another process: the arguments travel as one message, the result as another.

    caller                                            host (a Ray actor)
    submit(actor, TrainWorker.begin, [shard])  --->   call("begin", message)  --->   worker.begin(shard)
    decode_result(TrainWorker.begin, reply)    <---   encoded result          <---   its result

The caller passes the method itself, as in `TrainWorker.begin`. The annotations of that method give the types into which
both messages are decoded, and the type checker compares the caller's arguments with them (see `ActorHandle` in
trainers/cluster/calls.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_type_hints

from ...codecs import messages

F = TypeVar("F", bound=Callable[..., Any])


def in_thread_of(group: str) -> Callable[[F], F]:
    """Return a decorator that runs a method of the actor in the threads of its Ray concurrency group `group`. The main
    thread is then free."""

    def mark(method: F) -> F:
        method.__dict__["concurrency_group"] = group
        return method

    return mark


def submit(actor: Any, method: Callable[..., Any], message: bytes, actors: Sequence[Any] = ()) -> Any:
    """Start `method` in the process of `actor` (a Ray handle), and return Ray's reference to the encoded result.

    message: the arguments, encoded by `encode_arguments`. actors: the last arguments of the method, if these are Ray
    handles or lists of handles; they are passed separately from the message, because Ray tracks which processes hold a
    handle.
    """
    group = getattr(method, "concurrency_group", None)
    call = actor.call if group is None else actor.call.options(concurrency_group=group)
    return call.remote(method.__name__, message, *actors)


def encode_arguments(arguments: Sequence[Any]) -> bytes:
    """Return the arguments encoded as the message that `decode_arguments` reads. Raises TypeError for values that must
    not be sent, in particular tensors."""
    return messages.encode(list(arguments))


def decode_arguments(method: Callable[..., Any], message: bytes, num_actors: int = 0) -> tuple[Any, ...]:
    """Decode the arguments of `method` from `message`. The message does not contain the last `num_actors` arguments,
    which are Ray handles.

    Raises ValueError if the message does not fit the types of the parameters.
    """
    parameters, _ = _types(method)
    return messages.decode(message, _tuple_of(parameters[: len(parameters) - num_actors]))


def decode_result(method: Callable[..., Any], reply: bytes) -> Any:
    """Decode `reply`, the encoded result of a call of `method`, into the type of the method's return annotation."""
    return messages.decode(reply, _types(method)[1])


def invoke(target: object, method: str, message: bytes, actors: Sequence[Any] = ()) -> Any:
    """Run a method of `target` and return its result, which may be awaitable. method: its name. message: its encoded
    arguments. actors: Ray handles, which are passed as the last arguments."""
    arguments = decode_arguments(getattr(type(target), method), message, len(actors))
    return getattr(target, method)(*arguments, *actors)


@functools.cache
def _types(method: Callable[..., Any]) -> tuple[tuple[Any, ...], Any]:
    """Return the annotated types of a method's parameters, without `self`, and the annotated type of its result."""
    hints = get_type_hints(method)  # Ray adds a parameter to the signature, so the annotations are read instead.
    result = hints.pop("return")
    return tuple(hints.values()), result


@functools.cache
def _tuple_of(types: tuple[Any, ...]) -> Any:
    return tuple.__class_getitem__(types)
