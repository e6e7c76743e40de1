"""Calls of an actor's methods from another process: the arguments travel as one message, the result as another.

    caller                                            host (a Ray actor)
    submit(actor, TrainWorker.begin, [shard])  --->   call("begin", message)  --->   worker.begin(shard)
    decode_result(TrainWorker.begin, reply)    <---   encoded result          <---   its result

The caller names the very function that the host runs. Its annotations say what both messages are decoded into, and the
type checker compares the caller's arguments with them (see `ActorHandle` in trainers/cluster/calls.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_type_hints

from ..codecs import messages

F = TypeVar("F", bound=Callable[..., Any])


def in_thread_of(group: str) -> Callable[[F], F]:
    """Mark a method that the actor runs in the threads of concurrency group `group`, beside its main thread."""

    def mark(method: F) -> F:
        method.__dict__["concurrency_group"] = group
        return method

    return mark


def submit(actor: Any, method: Callable[..., Any], message: bytes, actors: Sequence[Any] = ()) -> Any:
    """Start `method` in the process of `actor` (Ray's handle); returns Ray's reference to the encoded result.

    message: from `encode_arguments`. actors: the method's last arguments, Ray handles or lists of them; they travel
    beside the message, as Ray counts who holds one.
    """
    group = getattr(method, "concurrency_group", None)
    call = actor.call if group is None else actor.call.options(concurrency_group=group)
    return call.remote(method.__name__, message, *actors)


def encode_arguments(arguments: Sequence[Any]) -> bytes:
    """The message that `decode_arguments` reads. Raises TypeError for what may not pass, tensors above all."""
    return messages.encode(list(arguments))


def decode_arguments(method: Callable[..., Any], message: bytes, num_actors: int = 0) -> tuple[Any, ...]:
    """Decode all arguments of `method` but its `num_actors` last ones, which are Ray handles.

    Raises ValueError when the message holds others.
    """
    parameters, _ = _types(method)
    return messages.decode(message, _tuple_of(parameters[: len(parameters) - num_actors]))


def decode_result(method: Callable[..., Any], reply: bytes) -> Any:
    """Decode what `method` returned into the type that its annotation says."""
    return messages.decode(reply, _types(method)[1])


@functools.cache
def _types(method: Callable[..., Any]) -> tuple[tuple[Any, ...], Any]:
    """Annotated types of a method's parameters, `self` left out, and of its result."""
    hints = get_type_hints(method)  # not the signature, to which Ray adds a parameter of its own
    result = hints.pop("return")
    return tuple(hints.values()), result


@functools.cache
def _tuple_of(types: tuple[Any, ...]) -> Any:
    return tuple.__class_getitem__(types)
