"""Checks `rollout.vllm`, the arguments that a configuration passes through to vLLM's engine, against vLLM's own.

`python -m headrace.actors.engines.vllm.options` reads the arguments as JSON from stdin and prints the sentences about
wrong ones as a JSON list. The driver runs it in a process of its own, because importing vLLM takes seconds and changes
the process.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import subprocess
import sys
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

CHECK_TIMEOUT_S = 120.0
"""Seconds that `problems_in_child` may take; most of it is vLLM's import, which is slow when its files are cold."""
OWN_KEYS: Mapping[str, str] = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tp",
    "data_parallel_size": "rollout.num_engines",
    "max_num_seqs": "rollout.max_batch",
    "max_model_len": "rollout.max_model_len",
    "kv_cache_memory_bytes": "rollout.kv_cache",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enable_return_routed_experts": "router_replay.enabled",
}
"""Argument of vLLM -> the config key that sets it."""
OWN_VALUES: Mapping[str, str] = {
    "generation_config": "the model's own defaults would change the distribution that is sampled from",
    "override_generation_config": "other defaults would change the distribution that is sampled from",
    "logprobs_mode": "training needs the log-probs of the distribution that was sampled from",
    "weight_transfer_config": "Headrace brings new weights itself, as `sync` says",
    "worker_extension_cls": "Headrace's own extension receives the weights",
    "enable_sleep_mode": "Headrace turns it on where engines can sleep",
    "distributed_executor_backend": "Headrace watches the processes of one host",
    "pipeline_parallel_size": "weights are sent to tensor-parallel processes only, see rollout.tp",
    "prefill_context_parallel_size": "weights are sent to tensor-parallel processes only, see rollout.tp",
    "nnodes": "an engine stays on one host",
    "node_rank": "an engine stays on one host",
    "master_addr": "an engine stays on one host",
    "master_port": "an engine stays on one host",
    "skip_tokenizer_init": "requests are token ids, and vLLM gets the tokenizer once a request has stop texts",
    "disable_log_stats": "nothing reads vLLM's own statistics",
    "enable_log_requests": "Headrace submits requests without vLLM's server",
    "aggregate_engine_logging": "nothing reads vLLM's own statistics",
}
"""Argument of vLLM that Headrace sets or that has no effect here -> why."""
SIMILAR = 0.6
"""Smallest similarity of two names (`difflib`, 0 to 1) at which an unknown name counts as a misspelling."""


def option_problems(options: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each of the `options` that cannot be passed to vLLM. Its engine does not have the option
    or expects another type, or Headrace sets it itself. Raises ImportError if vLLM is not installed."""
    from .library import AsyncEngineArgs

    known = {field.name: field.type for field in dataclasses.fields(AsyncEngineArgs)}
    problems = []
    for name, value in options.items():
        key = f"rollout.vllm.{name}"
        if own := _own_key(name):
            problems.append(f"{key}: got {value!r}, expected it unset, because {own} sets it")
        elif name in OWN_VALUES:
            problems.append(f"{key}: got {value!r}, expected it unset, because {OWN_VALUES[name]}")
        elif name not in known or name.startswith("_"):
            near = difflib.get_close_matches(name, [one for one in known if one[0] != "_"], 1, SIMILAR)
            hint = f"did you mean {near[0]}?" if near else "expected an argument of vLLM's AsyncEngineArgs"
            problems.append(f"{key}: vLLM's engine has no such argument; {hint}")
        elif reason := _misfit(known[name], value):
            problems.append(f"{key}: got {value!r}, {reason}")
    return problems


def _own_key(name: str) -> str:
    """Return the config key that sets vLLM's argument `name`; "" if there is none."""
    if name.startswith("data_parallel_"):
        return OWN_KEYS["data_parallel_size"]
    return OWN_KEYS.get(name, "")


def _misfit(annotation: Any, value: Any) -> str:
    """Return what is wrong with `value` for an argument with vLLM's `annotation`, as the end of a sentence. Returns ""
    if nothing is, or if the annotation cannot be checked; vLLM then checks it at the engine's start."""
    if members := _members(annotation):
        return "" if value is None or value in members else f"expected one of {', '.join(members)}"
    try:
        adapter = TypeAdapter(annotation)
    except (PydanticSchemaGenerationError, PydanticUserError, NameError, TypeError):
        return ""
    try:
        taken = adapter.validate_python(value)
    except ValidationError as error:
        return " or ".join(dict.fromkeys(map(_expectation, error.errors())))
    except (TypeError, ValueError, AssertionError) as error:
        return f"which vLLM refuses ({error})"
    # Pydantic would turn "16" into 16, but vLLM's dataclass keeps the text.
    if isinstance(value, str) and isinstance(taken, (bool, int, float)):
        return "expected true or false" if isinstance(taken, bool) else "expected a number"
    return ""


def _members(annotation: Any) -> Mapping[str, enum.Enum]:
    """Return the members of the enum that `annotation` is or contains, by name; {} if it has none."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return kind.__members__
    return {}


def _expectation(error: Any) -> str:
    message = error["msg"]
    if message.startswith("Input should be "):
        return "expected " + message.removeprefix("Input should be ")
    return f"which vLLM refuses ({'.'.join(map(str, error['loc']))}: {message})"


def arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` as arguments of vLLM's AsyncEngineArgs, in which names of enum members are the members. Raises
    ValueError with one sentence for each wrong one, see `option_problems`."""
    if problems := option_problems(options):
        raise ValueError("\n".join(problems))
    from .library import AsyncEngineArgs

    members = {field.name: _members(field.type) for field in dataclasses.fields(AsyncEngineArgs)}
    return {name: members[name].get(value, value) if members[name] else value for name, value in options.items()}


def problems_in_child(options: Mapping[str, Any]) -> list[str]:
    """Return what `option_problems` says, found by a child process. If vLLM is not installed, or the child fails or
    takes longer than CHECK_TIMEOUT_S, the list has one sentence that says so."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, input=json.dumps(options), capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"rollout.vllm: vLLM was not imported within {CHECK_TIMEOUT_S:.0f} s, expected its arguments"]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        return [f"rollout.vllm: the arguments could not be checked, because vLLM was not imported ({last})"]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(option_problems(json.load(sys.stdin))))
