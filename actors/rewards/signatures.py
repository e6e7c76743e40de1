"""Checks before a run that a reward function takes the arguments that it will get, by their names.

Rewards are called by position. A function that was written for another library would take a prompt for a data source,
or a finish reason for the expected answer, and return 0 for ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from .apart import wanted_by
from .config import RewardFunctionConfig

ARGUMENTS: Mapping[str, tuple[str, str, str]] = {
    "sample": ("prompt", "response", "finish_reason"),
    "group": ("prompt", "responses", "finish_reasons"),
}
"""Value of `per` -> names of the arguments of a reward function."""

OTHER_LIBRARIES = (
    ("verl", {"data_source", "solution_str", "ground_truth", "extra_info"}, "call it from a function of these "
     "arguments as `f(prompt.fields.get('data_source'), response, prompt.answer, prompt.fields)`"),
    ("OpenRLHF", {"queries", "labels"}, "call it from a function of these arguments as "
     "`float(f([prompt.text + response], [prompt.text], [prompt.answer])[0])`"),
    ("TRL", {"prompts", "completions", "completion_ids"},
     "wrap it as `headrace.rewards.from_trl(f)`, a reward with per='group'"),
)  # fmt: skip
"""Name of a library, arguments by which its rewards are known, and how such a reward becomes one of ours."""


def check_signature(config: RewardFunctionConfig, target: Any) -> None:
    """Check that the function or class `target` takes a reward's arguments and the options of `config`.

    Raises ValueError, which names the arguments that are expected and those that were found, if it does not.
    """
    called = target
    if inspect.isclass(target):
        bind_options(config, target)
        if not any("__call__" in vars(one) for one in target.__mro__):
            raise ValueError(f"reward.functions: objects of {config.kind!r} cannot be called, expected `__call__`")
        called = target.__call__
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except ValueError:  # Some built-in callables have no signature. Wrong arguments then fail only in the call.
        return
    parameters = parameters[1:] if inspect.isclass(target) else parameters
    expected = ARGUMENTS[config.per]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    names = tuple(one.name.lstrip("_") for one in named[: len(expected)])
    endless = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if names != expected[: len(names)] or (len(names) < len(expected) and not endless):
        found = ", ".join(str(one.replace(annotation=one.empty)) for one in parameters)
        raise ValueError(
            f"reward.functions: {config.kind!r} takes ({found}), expected ({', '.join(expected)})"
            f"{_advice(config, {one.name for one in parameters}, names)}"
        )
    if called is target:
        bind_options(config, target)


def bind_options(config: RewardFunctionConfig, target: Any) -> None:
    """Raise ValueError if the function or class `target` does not take the options of `config`."""
    wanted = [] if inspect.isclass(target) else list(wanted_by(target))
    given = {} if config.runs == "process" else dict.fromkeys(wanted)
    if clash := sorted(given.keys() & config.options.keys()):
        raise ValueError(
            f"reward.functions: {config.kind!r} has the option {clash[0]!r}, expected no such option, because "
            "each call gets this argument from its sample"
        )
    try:
        signature = inspect.signature(target)
        signature.bind(*(() if inspect.isclass(target) else ARGUMENTS[config.per]), **{**given, **config.options})
    except TypeError as error:
        sentence = f"reward.functions: {config.kind!r} with options {sorted(config.options)}: {error}"
        if config.runs == "process" and wanted:
            sentence += f", and runs='process' does not give {' and '.join(wanted)}"
        raise ValueError(sentence) from error
    except ValueError:  # Some built-in callables have no signature. Wrong options then fail only in the call.
        return


def _advice(config: RewardFunctionConfig, found: set[str], names: tuple[str, ...]) -> str:
    """Return the end of the sentence about wrong arguments. found: names of all arguments. names: names of the first
    three."""
    for library, known, way in OTHER_LIBRARIES:
        if found & known:
            return f"; it looks like a reward of {library}: {way} (docs/start/coming-from.md)"
    other = "group" if config.per == "sample" else "sample"
    if names == ARGUMENTS[other]:
        return f", or per={other!r}"
    return " in this order" if sorted(names) == sorted(ARGUMENTS[config.per]) else ""
