"""Loads a Config from a YAML file and `key.sub=value` overrides, and reports each mistake in one sentence."""

from __future__ import annotations

import copy
import difflib
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ...actors.engines.config import ModelConfig
from ...actors.environments.config import EnvironmentConfig
from ...dataplane.config import Section
from ..errors import ConfigError
from ..fetch.gguf_folder import readable_model
from ..losses.config import LossConfig
from ..losses.distillation_config import DistillationConfig
from .checks import contradictions
from .config import Config
from .effects import idle_key_problems
from .object_files import read_objects
from .peers import NO_COUNTERPART, leaves, meant_keys
from .supervised_runs import supervised_sections
from .values.overrides import apply_override
from .values.yaml_values import NEEDS_QUOTES, parse_yaml, section_at

SHOWN_CHARS = 80
SectionT = TypeVar("SectionT", bound=Section)


RENAMED: Mapping[str, str] = {
    "rollout.kv_cache_mib": "rollout.kv_cache",
    "pool.residual_mib": "resources.residual_mib",
}
"""Former dotted name of a config key -> its present name. The former name still works, with a warning."""
ENVIRONMENT_KEYS: Mapping[str, str] = {
    "environment": "environment.kind",
    "tools": "environment.options.tools",
    "max_turns": "environment.options.max_turns",
}
"""Former key of section `rollout` -> present name of that setting of the environment."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, of_old_run: bool = False) -> Config:
    """Load the configuration from the YAML file `path`, apply `overrides`, and check everything. An override is
    `key.sub=value` (see `overrides.py`); later overrides win.

    of_old_run: True for the configuration of an existing run. A key that is set without effect then only causes a
    warning, because the version that began the run can have accepted it. Raises ConfigError with one sentence for each
    problem.
    """
    given, keys = read_sections(path, overrides), overridden_keys(overrides)
    return build_config(given, keys, of_old_run=of_old_run, folder=Path(path).parent)


def overridden_keys(overrides: Sequence[str]) -> set[str]:
    """Return the dotted keys of overrides such as `trainer.lr=1e-4`."""
    return {override.partition("=")[0].strip() for override in overrides}


def read_sections(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the sections of the YAML file `path` with `overrides` applied, unchecked. Raises ConfigError if the file
    cannot be read or is not YAML with keys, or if an override does not fit the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: the file cannot be read ({error.strerror}), expected a YAML file"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: the file is not UTF-8 text ({error.reason}), expected a YAML file"]) from error
    data = parse_yaml(text, str(path), Config)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: got {_shown(data)}, expected sections such as `trainer:` with keys below them"])
    for override in overrides:
        apply_override(data, override, Config)
    return data


def build_config(
    data: Mapping[str, Any],
    overridden: Collection[str] = (),
    *,
    of_old_run: bool = False,
    folder: Path | None = None,
) -> Config:
    """Build a checked Config from nested dicts of plain values. Raises ConfigError with one sentence for each problem.

    overridden: dotted keys of the command line. of_old_run: see `load_config`. folder: run folder from which objects of
    a script or notebook are read that this process does not have; None for none."""
    config = _checked(data, overridden, of_old_run)
    read_objects(config.objects, [place for place in (folder, config.run.dir) if place is not None])
    return config


def validated(root: type[SectionT], data: Mapping[str, Any]) -> SectionT:
    """Validate `data` as a section of the class `root`, and return the section. Raises ConfigError with one sentence
    for each key that is unknown, missing or has a wrong value."""
    try:
        return root.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_joined(s for problem in error.errors() for s in _sentences(problem, root))) from None


def _checked(data: Mapping[str, Any], overridden: Collection[str] = (), of_old_run: bool = False) -> Config:
    # YAML reads a section with all its keys commented out as null. Such a section has its defaults.
    given = {key: {} if value is None and key in Config.model_fields else value for key, value in data.items()}
    given = _with_kind_of_advantage(_environment_keys(renamed_keys(given, RENAMED), of_old_run))
    corrected = _with_one_thread(_with_correction(given))
    if corrected is not given:
        # Keys that have no effect with this one are no mistake of the user.
        overridden = {*overridden, "algorithm.prev_logprobs"}
    config = validated(Config, corrected)
    config = config.model_copy(update=_readable_models(config.model, config.loss, config.distillation))
    if config.sft.train:
        changed = supervised_sections(
            config.sft,
            config.algorithm,
            config.loss,
            config.rollout,
            config.validation,
            config.logging,
            config.data.images,
        )
        config = config.model_copy(update=changed)
    problems, idle = contradictions(config), idle_key_problems(config, overridden)
    if of_old_run:
        for sentence in idle:
            warnings.warn(sentence, FutureWarning, stacklevel=3)
    else:
        problems += idle
    problems += missing_paths(config.model.path, config.sources).values()
    if problems:
        raise ConfigError(problems, config)
    return config


def _readable_models(model: ModelConfig, loss: LossConfig, distillation: DistillationConfig) -> dict[str, Any]:
    """Return the sections that name a GGUF file, with its Hugging Face folder instead, by the section's name.

    The first call makes the folder, which takes a while; other models are not looked into.
    """
    changed: dict[str, Any] = {}
    if (path := readable_model(model.path)) != model.path:
        changed["model"] = model.model_copy(update={"path": path})
    reference = loss.reference_model
    if reference is not None and (path := readable_model(reference)) != reference:
        changed["loss"] = loss.model_copy(update={"reference_model": path})
    paths = [readable_model(teacher.model) for teacher in distillation.teachers]
    if paths != [teacher.model for teacher in distillation.teachers]:
        pairs = zip(distillation.teachers, paths, strict=True)
        teachers = tuple(teacher.model_copy(update={"model": path}) for teacher, path in pairs)
        changed["distillation"] = distillation.model_copy(update={"teachers": teachers})
    return changed


def renamed_keys(data: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return a copy of `data` with values moved from former names of keys to their present names. Warns about each
    move.

    renamed: former dotted name -> present one. Raises ConfigError if both names of a key are set to different values.
    """
    moved = copy.deepcopy(dict(data))
    for old, new in renamed.items():
        *sections, name = old.split(".")
        path: list[Any] = [moved]
        for section in sections:
            path.append(path[-1].get(section) if isinstance(path[-1], dict) else None)
        if not isinstance(path[-1], dict) or name not in path[-1]:
            continue
        value = path[-1].pop(name)
        for holder, section in reversed(list(zip(path, sections, strict=False))):
            if not holder[section]:
                del holder[section]  # The section is removed, because its last key was moved.
        *sections, new_name = new.split(".")
        there = moved
        for section in sections:
            there[section] = there.get(section) or {}
            there = there[section]
        if new_name in there and there[new_name] != value:
            raise ConfigError([f"{old}: got {_shown(value)} beside {new}, expected only {new}, its present name"])
        there[new_name] = value
        warnings.warn(f"{old} is now called {new}, please rename it in your configuration", FutureWarning, stacklevel=4)
    return moved


def _environment_keys(data: dict[str, Any], of_old_run: bool) -> dict[str, Any]:
    """Move the keys of section `rollout` that once named the environment to section `environment`, in place. Warns
    about each of these keys. They had an effect only while `environment.kind` was unset, `tools` and `max_turns` only
    with `tool_use`. Raises ConfigError if `environment.kind` is set too, and for the former key
    `environment.on_timeout`, unless the configuration is that of an old run (`of_old_run`), which lists all keys.
    """
    rollout, environment = data.get("rollout"), data.get("environment")
    if isinstance(environment, dict) and "on_timeout" in environment:
        late = environment.pop("on_timeout")
        if not of_old_run:
            raise ConfigError(
                [
                    f"environment.on_timeout: got {_shown(late)}, expected the key environment.on_failure.limit, which "
                    "has replaced it (mask, or partial to keep the rewards so far)"
                ]
            )
        if late == "partial":
            environment["on_failure"] = {"limit": "partial", **(environment.get("on_failure") or {})}
    if isinstance(environment, dict) and environment.get("kind", "") is None:
        del environment["kind"]  # In older versions, null left the kind to `rollout.environment`.
    if not isinstance(rollout, dict):
        return data
    former = {name: rollout.pop(name) for name in ENVIRONMENT_KEYS if name in rollout}
    if former and (environment is None or isinstance(environment, dict) and "kind" not in environment):
        data["environment"] = environment = environment or {}
        environment["kind"] = kind = former.get("environment", EnvironmentConfig().kind)
        options = {
            name: former[name]
            for name, default in (("tools", ["calculator"]), ("max_turns", 4))
            if name in former and (kind == "tool_use" or former[name] != default)
        }
        if options:
            environment["options"] = {**options, **(environment.get("options") or {})}
    elif former and not of_old_run:
        raise ConfigError(
            [
                f"rollout.{name}: got {_shown(value)} beside environment.kind, expected only "
                f"{ENVIRONMENT_KEYS[name]}, its present name"
                for name, value in former.items()
            ]
        )
    for name in former:
        sentence = f"rollout.{name} is now called {ENVIRONMENT_KEYS[name]}, please rename it in your configuration"
        warnings.warn(sentence, FutureWarning, stacklevel=4)
    return data


def _with_kind_of_advantage(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` with the former key `advantage.normalize_std` expressed by `advantage.kind`. Warns if the former
    key was false."""
    advantage = data.get("advantage")
    if not isinstance(advantage, dict) or not isinstance(advantage.get("normalize_std"), bool):
        return data
    others = {key: value for key, value in advantage.items() if key != "normalize_std"}
    if not advantage["normalize_std"]:
        if others.get("kind", "grpo") not in ("grpo", "dr_grpo"):
            return data  # The key had no effect here, so it is refused as unknown.
        others["kind"] = "dr_grpo"
        warnings.warn(
            "advantage.normalize_std=false is now advantage.kind=dr_grpo, please say it so in your configuration",
            FutureWarning,
            stacklevel=4,
        )
    return {**data, "advantage": others}


def _with_correction(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` with a correction for engines or trainers that compute with few bits, and its log-probs.

    Returns `data` itself without such engines and trainers, or if it has one of the keys that this function sets."""
    sections = [data.get(name, {}) for name in ("rollout", "sft", "loss", "algorithm", "trainer")]
    if not all(isinstance(section, dict) for section in sections):
        return data  # The mistake is reported when the sections are validated.
    rollout, sft, loss, algorithm, trainer = sections
    exact = rollout.get("quantization", "none") == trainer.get("fp8", "none") == "none"
    if exact and rollout.get("kv_cache_dtype", "auto") == "auto":
        return data
    if sft.get("train") or "correction" in loss or "prev_logprobs" in algorithm:
        return data
    changed = {"loss": {**loss, "correction": "tis"}, "algorithm": {**algorithm, "prev_logprobs": "recompute"}}
    return {**data, **changed}


def _with_one_thread(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` with one thread for each worker on CPUs if log-probs must be equal bit for bit. Returns `data`
    itself if they need not, or if it has the number of threads."""
    rollout, run, resources = (data.get(name, {}) for name in ("rollout", "run", "resources"))
    if not all(isinstance(section, dict) for section in (rollout, run, resources)):
        return data  # The mistake is reported when the sections are validated.
    if run.get("bitwise") is not True or rollout.get("engine", "hf") != "hf" or resources.get("threads") is not None:
        return data
    return {**data, "resources": {**resources, "threads": 1}}


# ---------------- These functions word messages for the user.


def _sentences(problem: Mapping[str, Any], root: type[BaseModel]) -> list[str]:
    """Translate a pydantic error about `root` into sentences that name the key, the value and what was expected."""
    # "[key]" marks an error about the name of a section instead of a value in it. The others name a type of several.
    no_keys = ("[key]", "literal[", "tuple[")
    key = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(no_keys))
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "value_error":
        text = str(context["error"])
        return [f"{key}: {text}"] if key else text.split("\n")
    if kind == "extra_forbidden":
        return _of_another_library(problem["loc"], problem["input"], root) or [
            f"{key}: unknown key; {_suggestion(problem['loc'], root)}"
        ]
    if kind == "missing":
        return [f"{key}: not set, expected a value"]
    got = _shown(problem["input"])
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        model = section_at(problem["loc"], root)
        keys = f" with the keys {', '.join(model.model_fields)}" if model else " of keys and values"
        return [f"{key}: got {got}, expected a section{keys}"]
    hint = f" ({NEEDS_QUOTES})" if kind == "string_type" and isinstance(problem["input"], dict | None) else ""
    return [f"{key}: got {got}, expected {_expected(kind, problem['input'], context, problem['msg'])}{hint}"]


def _joined(sentences: Iterable[str]) -> list[str]:
    """Join the sentences about a value that could have several types, each of which pydantic reports."""
    expected: dict[str, list[str]] = {}
    for sentence in sentences:
        start, between, rest = sentence.partition(", expected ")
        expected.setdefault(start + between, []).append(rest)
    return [start + " or ".join(dict.fromkeys(rest)) for start, rest in expected.items()]


_PLAIN_EXPECTATIONS = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a finite number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "greater_than": "a number > {gt:g}",
    "greater_than_equal": "a number >= {ge:g}",
    "less_than": "a number < {lt:g}",
    "less_than_equal": "a number <= {le:.10g}",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "string_too_short": "text that is not empty",  # No key asks for more than one character.
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
}
"""Type of a pydantic error -> text about the expected value, with placeholders for the error's context."""


def _expected(kind: str, value: Any, context: Mapping[str, Any], message: str) -> str:
    if kind == "literal_error":
        choices = [text or number for text, number in re.findall(r"'([^']*)'|(\d+)", context["expected"])]
        near = difflib.get_close_matches(str(value), choices, 1) if len(choices) > 1 else []
        listed = f"one of {', '.join(choices)}" if len(choices) > 1 else repr(choices[0])
        return listed + (f" (did you mean {near[0]}?)" if near else "")
    if kind in _PLAIN_EXPECTATIONS:
        return _PLAIN_EXPECTATIONS[kind].format(**context)
    return message.removeprefix("Input should be ")


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else "nothing" if value is None else repr(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


SIMILAR, SIMILAR_ELSEWHERE = 0.7, 0.75
"""Smallest similarity of two names (`difflib`, 0 to 1) at which an unknown key counts as a misspelling: first for keys
of the same section, then for keys of other sections."""


def _of_another_library(location: Sequence[str | int], value: Any, root: type[BaseModel]) -> list[str]:
    """Return one sentence for each key in an unknown section that has the same name in another library. Returns [] if
    there is no such key; the error is then about the section itself."""
    if not isinstance(value, dict):
        return []
    above, own = [str(part) for part in location], {last for _, last in _all_keys(root, "")}
    found = [((*above, *path), meant_keys((*above, *path), own)) for path in leaves(value)]
    if not any(meant.parts > 1 for _, meant in found):
        return []
    return [f"{'.'.join(path)}: unknown key; {meant.hint or NO_COUNTERPART}" for path, meant in found]


def _suggestion(location: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return a hint for an unknown key: the key that was probably meant, or else the keys of the section. The
    candidates are, in order of preference, keys with the meaning of this name in other libraries, the same name in
    another section, the most similar name in this section, and the most similar name elsewhere.
    """
    *parents, name = (str(part) for part in location)
    model = section_at(location[:-1], root)
    siblings = list(model.model_fields) if model else []
    prefix = "".join(f"{part}." for part in parents)
    known = dict(_all_keys(root, ""))
    meant = meant_keys([str(part) for part in location], set(known.values()))
    if meant.hint:
        return meant.hint
    elsewhere = [dotted for dotted, last in known.items() if last == name]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    near = difflib.get_close_matches(name, siblings, 1, SIMILAR)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    near = difflib.get_close_matches(name, known.values(), 1, SIMILAR_ELSEWHERE)
    if near:
        return f"did you mean {' or '.join([dotted for dotted, last in known.items() if last == near[0]][:3])}?"
    return f"{prefix.rstrip('.') or 'the configuration'} has {', '.join(siblings)}"


def _all_keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, last part of its name) for every key of `model`, except for keys inside lists."""
    for name, field in model.model_fields.items():
        yield prefix + name, name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _all_keys(field.annotation, f"{prefix}{name}.")


def missing_paths(model: str, sources: Sequence[tuple[str, str | None]]) -> dict[str, str]:
    """Return the settings with a value that can only be a local path and does not exist: value -> sentence about it.
    model: value of `model.path`. sources: see `Config.sources`."""
    problems = {}
    if _only_a_path(model) and not Path(model).is_dir():
        problems[model] = f"model.path: got {model!r}, expected an existing model folder{_counted_from(model)}"
    for key, source in sources:
        if source and (_only_a_path(source) or source.endswith(".jsonl")) and not Path(source).exists():
            expected = f"expected an existing .jsonl file or dataset folder{_counted_from(source)}"
            problems[source] = f"{key}: got {source!r}, {expected}"
    return problems


def _counted_from(path: str) -> str:
    """Return the end of a sentence about a missing path: what a relative path is relative to."""
    return "" if Path(path).expanduser().is_absolute() else f" (relative paths count from {os.getcwd()})"


def _only_a_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~"))
