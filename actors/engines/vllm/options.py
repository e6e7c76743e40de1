"""Checks and completes the settings of a vLLM engine: its arguments, and the size of its key-value cache.

`python -m headrace.actors.engines.vllm.options` reads the arguments of `rollout.vllm` as JSON from stdin and prints one
sentence for each wrong argument, as a JSON list. The driver runs it in a process of its own, because importing vLLM
takes seconds and changes the process.
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

from ....codecs.integers import ceil_div, round_up

CHECK_TIMEOUT_S = 120.0
"""Time limit in seconds of `problems_in_child`. Most of the time goes into importing vLLM, which is slow when its files
are not in the page cache."""
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
"""Config key that sets an argument of vLLM, by argument."""
OWN_VALUES: Mapping[str, str] = {
    "generation_config": "the model's own defaults would change the distribution that is sampled from",
    "override_generation_config": "other defaults would change the distribution that is sampled from",
    "logits_processors": "they would change the distribution that is sampled from, which training cannot repeat",
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
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_dtype", "lora_target_modules"),
        "Headrace brings adapters itself, as trainer.lora and sync.adapter say",
    ),
}
"""Arguments of vLLM that Headrace sets or that have no effect here: argument -> reason."""
SIMILAR = 0.6
"""Smallest similarity of two names (`difflib`, 0 to 1) at which an unknown name counts as a misspelling."""
BLOCK = 128
"""Number of tokens in a block of vLLM's key-value cache on CPUs. A sequence takes whole blocks, and vLLM reserves one
block for itself."""
GPU_BLOCK = 64
"""Largest number of tokens in a block on GPUs. Most kernels have blocks of 16."""
SPARE = 1.25
"""Size of a key-value cache on GPUs over what a full batch of the longest sequences uses. The rest keeps prompts whose
keys and values are used again."""
CPU_BYTES = 256 << 20
CPU_SEQUENCES = 8
"""Number of sequences for which the key-value cache on CPUs has room, if memory allows."""
_OTHER_LAYERS = (
    "kv_lora_rank", "text_config", "is_encoder_decoder", "num_kv_shared_layers", "layers_block_type",
    "cross_attention_layers",
)  # fmt: skip
"""Config keys of models in which some layers do not keep the keys and values of every token."""
_OTHER_PREFIXES = ("mamba", "ssm", "linear_", "attn_layer")


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
    if the value is right, or if the annotation cannot be checked; vLLM then checks the value at the engine's start."""
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
    """Return `options` as arguments of vLLM's AsyncEngineArgs; names of enum members are replaced by the members.
    Raises ValueError with one sentence for each wrong option, see `option_problems`."""
    if problems := option_problems(options):
        raise ValueError("\n".join(problems))
    from .library import AsyncEngineArgs

    members = {field.name: _members(field.type) for field in dataclasses.fields(AsyncEngineArgs)}
    return {name: members[name].get(value, value) if members[name] else value for name, value in options.items()}


def problems_in_child(options: Mapping[str, Any]) -> list[str]:
    """Return the result of `option_problems`, computed in a child process. If vLLM is not installed, or the child fails
    or takes longer than CHECK_TIMEOUT_S, the list has one sentence about that."""
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


def token_bytes(model: Mapping[str, Any], *, value_bytes: int, tp: int) -> int | None:
    """Return the number of bytes that the keys and values of one token take in each process of an engine. Returns None
    if the config lacks the sizes, or if not all layers attend to all earlier tokens.

    model: content of the model's config.json. value_bytes: bytes of one number of the cache. tp: tensor-parallel size
    of the engine.
    """
    if "vision_config" in model and isinstance(model.get("text_config"), dict):  # A tower keeps nothing of a token.
        model = {key: value for key, value in model["text_config"].items() if value is not None}
    if not {"hidden_size", "num_hidden_layers", "num_attention_heads"} <= set(model):
        return None
    if any(model.get(key) for key in _OTHER_LAYERS) or any(key.startswith(_OTHER_PREFIXES) for key in model):
        return None
    if model.get("sliding_window") and model.get("use_sliding_window", True):
        return None
    if set(model.get("layer_types") or ()) - {"full_attention"}:
        return None
    heads = model["num_attention_heads"]
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    kv_heads = ceil_div(model.get("num_key_value_heads") or heads, tp)
    return model["num_hidden_layers"] * 2 * kv_heads * head_dim * value_bytes


def cache_bytes(per_token: int, length: int, num_sequences: int = 1) -> int:
    """Return the size in bytes of a key-value cache for `num_sequences` sequences of `length` tokens. per_token: see
    `token_bytes`."""
    return per_token * (num_sequences * round_up(length, BLOCK) + BLOCK)


def check_cache(size_bytes: int, per_token: int | None, length: int) -> None:
    """Raise ValueError if `size_bytes` of key-value cache hold no sequence of `length` tokens. An engine does not start
    with so little. per_token: see `token_bytes`; with None nothing is checked."""
    if per_token is None or size_bytes >= cache_bytes(per_token, length):
        return
    raise ValueError(
        f"rollout.kv_cache: got {size_bytes >> 20} MiB, expected auto or at least "
        f"{ceil_div(cache_bytes(per_token, length), 1 << 20)} MiB, for one sequence of {length} tokens of "
        f"{per_token:,} bytes each"
    )


def default_on_cpu(per_token: int | None, length: int, max_batch: int, available: int) -> int:
    """Return the default size in bytes of an engine's key-value cache on CPUs.

    It has 256 MiB, or what CPU_SEQUENCES sequences of `length` tokens (`max_batch`, if fewer) need if that is more, but
    then at most a quarter of the `available` bytes of memory, and never less than one sequence needs. per_token: see
    `token_bytes`; with None the cache has 256 MiB.
    """
    if per_token is None:
        return CPU_BYTES
    wanted = min(cache_bytes(per_token, length, min(max_batch, CPU_SEQUENCES)), available // 4)
    return max(CPU_BYTES, wanted, cache_bytes(per_token, length))


def most_on_gpu(per_token: int | None, length: int, max_batch: int, options: Mapping[str, Any]) -> int | None:
    """Return the size in bytes of the largest key-value cache on a GPU from which an engine gains anything.

    It has room for `max_batch` sequences of `length` tokens, and a quarter more. vLLM runs no more sequences at a time;
    all others wait without keys and values. per_token: see `token_bytes`. options: further arguments of vLLM. Returns
    None if the size is not known, which includes engines with a draft model, whose keys and values are there, too.
    """
    if per_token is None or not length or options.get("speculative_config"):
        return None
    return int(SPARE * per_token * (max_batch * round_up(length, GPU_BLOCK) + GPU_BLOCK))
