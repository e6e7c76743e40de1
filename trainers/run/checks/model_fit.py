"""Says what a model can be used with: meshes, engines, packing, replay, and the memory that it takes on a machine.

Only the model's config is read; the model itself is built on the meta device, without weights. Each answer comes from
the check that a run makes, so that the table says no with the sentence with which a run would be refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from ....actors.engines.config import ModelConfig
from ....actors.engines.hf.model import find_experts, find_routers, require_decoder
from ....actors.process.memory import assumed_machine, gpu_sizes
from ....actors.rollout.config import RolloutConfig
from ....codecs.tokens.routes import RouteSpec
from ...backends.config import TrainerConfig
from ...backends.families.megatron import FAMILIES, require_family
from ...backends.fsdp.bitwise.conditions import check_family
from ...backends.fsdp.context_parallel import require_splittable
from ...backends.fsdp.expert_parallel import require_experts
from ...backends.fsdp.output_checks import head_of
from ...backends.fsdp.row_checks import token_counts
from ...backends.hf_model import build_empty
from ...backends.lora.adapted_layers import find_targets
from ...backends.lora_config import LoraConfig
from ...backends.model_split import check_split, mesh_problems, resolved_packing
from ...cluster.gpu_memory import CONTEXT_BYTES, USABLE, GpuMemory, ModelSize, estimate
from ...config.config import Config
from .doctor import Finding, State

RANKS = (2, 4, 8, 16)
"""Numbers of ranks that are tried for each key of a mesh."""
VLLM_TIMEOUT_S = 120.0
_ONE = {"dp": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "sequence_parallel": False}
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "intermediate_size",
)  # fmt: skip
_VLLM = """
import json, sys
from vllm.model_executor.models.registry import ModelRegistry
print("\\nHEADRACE " + json.dumps(sorted(set(sys.argv[1:]) & set(ModelRegistry.get_supported_archs()))))
"""


@dataclass(frozen=True, slots=True)
class ModelFit:
    """Lists the meshes, engines and machines that fit a model, as its config alone shows them."""

    findings: tuple[Finding, ...]
    """Lines of its table."""
    fits: bool
    """True if a backend can train the model, and an engine can sample from it."""
    parameters: int
    """Number of parameters of the model."""
    replay: bool
    """True if the model has experts whose routers can be replayed."""


def examine_model(config: Config) -> ModelFit:
    """Return what the model of `config` can be used with, in the number format and on the mesh of `config`.

    The memory is that of this machine's GPUs, or of the assumed machine's. Raises ValueError if there is no such model,
    if transformers cannot build it as a causal LM, or if the configuration asks of it what it cannot do.
    """

    def estimated(total: int, **sections: Mapping[str, Any]) -> GpuMemory:
        changed = {name: getattr(config, name).model_copy(update=dict(keys)) for name, keys in sections.items()}
        memory = estimate(config.model_copy(update=changed), total, size)
        assert memory is not None, "the size is known"
        return memory

    with ThreadPoolExecutor(1) as pool:
        hf, model = _built(config.model)
        _check_own_mesh(config.trainer, model)
        if config.run.bitwise:
            check_family(model.config, config.rollout.engine)
        known = pool.submit(_vllm_knows, getattr(hf, "architectures", None) or [])
        size = _size(model)
        backends = (
            *_fsdp(config.trainer, model, config.rollout.engine),
            *_megatron(config.trainer, config.model.path, hf),
        )
        engines = tuple(_engines(model, hf, known.result))
        findings = (
            *_about(hf, model, size),
            *backends,
            *engines,
            *_memory(config.trainer, config.rollout, size.parameters, estimated),
        )
    trains = any(found.name == "trains" and found.state is State.OK for found in backends)
    replay = any(found.name == "router replay" and found.state is State.OK for found in backends)
    return ModelFit(findings, trains and any(found.state is State.OK for found in engines), size.parameters, replay)


def _built(wanted: ModelConfig) -> tuple[Any, Any]:
    """Return the HF config of the model, and the model on the meta device as the train workers build it."""
    path = wanted.path
    if Path(path).is_file():
        raise ValueError(f"--model: got the file {path!r}, expected the folder of the model")
    try:
        hf = AutoConfig.from_pretrained(path)
        return hf, build_empty(path, hf, wanted.attention)
    except Exception as error:  # The libraries raise errors of many kinds for a wrong config.
        if str(error).startswith("model.attention"):
            raise
        reason = " ".join(str(error).split())[:300] or "no reason given"
        raise ValueError(
            f"--model: got {path!r}, expected a folder or hub id of a model that transformers can build "
            f"({type(error).__name__}: {reason})"
        ) from error


def _check_own_mesh(trainer: TrainerConfig, model: Any) -> None:
    """Raise ValueError when the model cannot be split over the mesh of the configuration."""
    if any(getattr(trainer, key) != 1 for key in ("tp", "cp", "pp", "ep")):
        for problem in mesh_problems(trainer):
            raise ValueError(problem)
        check_split(trainer, model.config.get_text_config() if trainer.backend == "fsdp" else model.config)
        if trainer.backend == "fsdp" and trainer.cp > 1:
            require_splittable(model, trainer.cp)


def _about(hf: Any, model: Any, size: ModelSize) -> Iterator[Finding]:
    text = model.config.get_text_config()
    name = type(model).__name__
    yield _yes("model", "type", hf.model_type + ("" if hf.model_type == text.model_type else f", {text.model_type}"))
    stacked = [experts for _, experts in find_experts(model)]
    experts = sum(param.numel() for module in stacked for param in module.parameters())
    spec = RouteSpec.of(text)
    of_experts = f", {experts:,} of them in stacked experts" * bool(experts)
    routed = "" if spec is None else f"; {spec.top_k} of {spec.num_experts} experts in {len(spec.layers)} layers"
    yield _yes("model", "parameters", f"{size.parameters:,}{of_experts}{routed}")
    context = getattr(text, "max_position_embeddings", None)
    if context is not None:
        counts = sorted({count for count in token_counts(text.to_dict()) if count < context})
        within = f"; windows, chunks or scaling of {', '.join(f'{n:,}' for n in counts)} tokens" * bool(counts)
        yield _yes("model", "context", f"{context:,} tokens{within}")
    yield _yes("model", "attention", f"{model.config._attn_implementation} of {name}")
    yield _lora_targets(model, stacked)


def _lora_targets(model: Any, stacked: Sequence[nn.Module]) -> Finding:
    """Return the names of the layers that get an adapter with `trainer.lora.targets=all-linear`.

    Those of stacked experts, which get one with `trainer.lora.experts=true`, follow.
    """
    try:
        names = sorted({name.rpartition(".")[2] for name in find_targets(model, LoraConfig(rank=1))})
    except ValueError as error:
        return Finding("model", "LoRA targets", State.NOTE, str(error))
    further = sorted(
        {f"experts.{part}" for module in stacked for part, param in module.named_parameters() if param.ndim == 3}
    )
    return _yes("model", "LoRA targets", ", ".join(names) + (f"; stacked: {', '.join(further)}" * bool(further)))


def _fsdp(trainer: TrainerConfig, model: Any, engine: str) -> Iterator[Finding]:
    text = model.config.get_text_config()
    spec = RouteSpec.of(text)

    def split(**ranks: int) -> None:
        check_split(trainer.model_copy(update={**_ONE, "backend": "fsdp", "packing": "auto", **ranks}), text)

    def split_experts(ep: int) -> None:
        split(ep=ep)
        require_experts(model, ep)

    yield _tried(
        "fsdp",
        "trains",
        partial(split, dp=1),
        f"on any number of ranks (trainer.dp), with the output layer {_head(model)}",
    )
    yield _by_ranks("fsdp", "trainer.tp", lambda tp: split(tp=tp))
    if spec is not None:
        yield _by_ranks("fsdp", "trainer.ep", split_experts)
    yield _by_ranks("fsdp", "trainer.cp", lambda cp: require_splittable(model, cp))
    yield _packing(trainer.model_copy(update={**_ONE, "backend": "fsdp"}), text)
    exact = partial(check_family, model.config, engine)
    yield _tried("fsdp", "run.bitwise", exact, f"with the engine {engine}")
    if spec is not None:
        why = "router_replay.enabled: got true, expected false"
        routers = partial(find_routers, model, spec.layers, why)
        yield _tried("fsdp", "router replay", routers, f"{spec.trailing[0]} x {spec.top_k} expert ids per token")


def _head(model: Any) -> str:
    return "on wanted tokens only" if head_of(model, "auto") == "selected" else "on all tokens"


def _packing(trainer: TrainerConfig, text: Any) -> Finding:
    packed = trainer.model_copy(update={"packing": "packed"})
    chosen = resolved_packing(trainer.model_copy(update={"packing": "auto", "mixed_precision": True}), text, gpu=True)
    found = _tried("fsdp", "packed rows", partial(check_split, packed, text), "the default on GPUs in bfloat16")
    if found.state is not State.OK or chosen == "packed":
        return found
    detail = "not known from a config; with trainer.packing=packed a run tests at its start that no row sees another"
    return Finding("fsdp", "packed rows", State.NOTE, detail)


def _megatron(trainer: TrainerConfig, path: str, hf: Any) -> Iterator[Finding]:
    check = partial(require_family, path, hf)
    first = _tried("megatron", "trains", check, f"with a table of weights for {hf.model_type}")
    yield first
    if first.state is not State.OK:
        return

    def split(**ranks: int) -> None:
        parallel: dict[str, Any] = {"sequence_parallel": ranks.get("tp", 1) > 1, "dp": ranks.get("ep", 1)}
        if FAMILIES[hf.model_type].whole_experts:
            parallel["ep"] = ranks.get("tp", 1)
        check_split(trainer.model_copy(update={**_ONE, "backend": "megatron", **parallel, **ranks}), hf)

    keys = ("tp", "ep", "pp") if RouteSpec.of(hf) is not None else ("tp", "pp")
    for key in keys:
        yield _by_ranks("megatron", f"trainer.{key}", lambda count, key=key: split(**{key: count}))
    yield _yes("megatron", "trainer.cp", ", ".join(map(str, RANKS)))
    if "ep" in keys:
        yield _yes("megatron", "router replay", "of every megatron family with experts")


def _engines(model: Any, hf: Any, known: Callable[[], list[str] | None]) -> Iterator[Finding]:
    yield _tried("engine", "hf", partial(require_decoder, type(model)), "decodes with a cache")
    served, named = known(), getattr(hf, "architectures", None) or []
    if served is None:
        yield Finding("engine", "vllm", State.NOTE, "vLLM is not installed, so it was not asked")
    elif served:
        yield _yes("engine", "vllm", f"has code for {', '.join(served)}")
    else:
        yield Finding("engine", "vllm", State.NOTE, f"the installed vLLM has no code for {', '.join(named) or 'it'}")


def _vllm_knows(architectures: list[str]) -> list[str] | None:
    """Return which of the classes the installed vLLM has code for; None if it is not installed or does not answer."""
    if find_spec("vllm") is None:
        return None
    try:
        command = [sys.executable, "-c", _VLLM, *architectures]
        done = subprocess.run(command, capture_output=True, text=True, timeout=VLLM_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    answers = [line for line in done.stdout.splitlines() if line.startswith("HEADRACE ")]
    return json.loads(answers[-1].removeprefix("HEADRACE ")) if answers else None


def _size(model: Any) -> ModelSize:
    text = model.config.get_text_config()
    shape = {key: getattr(text, key, None) for key in _SIZES}
    shape["num_key_value_heads"] = shape["num_key_value_heads"] or shape["num_attention_heads"]
    width = shape["intermediate_size"] or 4 * text.hidden_size
    spec = RouteSpec.of(text)
    if spec is not None:
        routed = spec.top_k * (getattr(text, "moe_intermediate_size", None) or width)
        shared = getattr(text, "shared_expert_intermediate_size", None) or 0
        width = routed + shared
    shape |= {"intermediate_size": width, "vision_config": model.config.to_dict().get("vision_config")}
    return ModelSize(model.num_parameters(), shape)


Estimated = Callable[..., GpuMemory]
"""Function from the bytes of a GPU, and changed keys of sections, to the memory of a run on it."""


def _memory(trainer: TrainerConfig, rollout: RolloutConfig, parameters: int, estimated: Estimated) -> Iterator[Finding]:
    """Yield the parts of the memory of a GPU, with the fewest GPUs on which training and the engine fit."""
    gpus, assumed = gpu_sizes(), assumed_machine()
    if not gpus:
        state = _gib(16 * parameters)
        more = "this machine has no GPU; --machine 1x8x80 asks about another one"
        yield Finding("memory", "GPU", State.NOTE, f"training takes {state} GiB over all GPUs, and activations; {more}")
        return
    total, most = min(gpus), len(gpus) * (1 if assumed is None else assumed.num_hosts)
    yield _train_worker(trainer, total, most, estimated)
    if rollout.engine == "scripted":
        return
    sizes = [estimated(total, rollout={"tp": tp}).engine for tp in _doublings(most)]
    held = [{name: value for name, value in one.items() if name != "keys and values"} for one in sizes]
    index = next((n for n, one in enumerate(held) if _fits(one, total)), len(held) - 1)
    where = f"on {_gpus(1 << index, total)} (rollout.tp={1 << index})"
    yield _of_parts("engine", held[index], total, where, "; the rest holds keys and values", "more GPUs per engine")


def _train_worker(trainer: TrainerConfig, total: int, most: int, estimated: Estimated) -> Finding:
    """Return the line of a train worker on the fewest of `most` GPUs on which it fits.

    If it fits on none, `trainer.recompute=full` is tried, too.
    """
    replica = trainer.topology.replica_size
    if replica > most:
        detail = f"{replica} GPUs are needed for one replica (tp x cp x pp), but the machine has {most}"
        return Finding("memory", "train worker", State.FIX, detail)
    sizes = _doublings(most // replica)
    kinds = list(dict.fromkeys((trainer.recompute, "full")))
    tried = [(dp, kind) for kind in kinds for dp in sizes]
    memory = [estimated(total, trainer={"dp": dp, "recompute": kind}).trainer for dp, kind in tried]
    index = next((n for n, parts in enumerate(memory) if _fits(parts, total)), len(tried) - 1)
    dp, kind = tried[index]
    where = f"on each of {_gpus(dp * replica, total)} (trainer.dp={dp}, trainer.recompute={kind})"
    state = {name: value for name, value in memory[index].items() if name in ("weights", "gradients", "optimizer")}
    advice = "more GPUs" + " or a smaller trainer.tokens_per_microbatch" * _fits(state, total)
    return _of_parts("train worker", memory[index], total, where, "", advice)


def _gpus(count: int, total: int) -> str:
    return f"{count} GPU{'s' * (count > 1)} of {_gib(total)} GiB"


def _of_parts(name: str, parts: Mapping[str, int], total: int, where: str, more: str, advice: str) -> Finding:
    """Return the line of one process on a GPU: the sum of its parts, the parts, and whether they fit."""
    listed = ", ".join(f"{part} {_gib(value)}" for part, value in parts.items() if value)
    fits = _fits(parts, total)
    detail = f"{_gib(sum(parts.values()))} GiB {where}: {listed}{more if fits else f'; too much: needs {advice}'}"
    return Finding("memory", name, State.OK if fits else State.FIX, detail)


def _fits(parts: Mapping[str, int], total: int) -> bool:
    return sum(parts.values()) + CONTEXT_BYTES <= USABLE * total


def _doublings(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, up to `most`."""
    return [1 << power for power in range(most.bit_length())] if most else []


def _yes(area: str, name: str, detail: str) -> Finding:
    return Finding(area, name, State.OK, detail)


def _tried(area: str, name: str, check: Callable[[], object], detail: str) -> Finding:
    """Return `detail`, or the sentence of the ValueError that `check` raises."""
    try:
        check()
    except ValueError as error:
        return Finding(area, name, State.NOTE, str(error))
    return _yes(area, name, detail)


def _by_ranks(area: str, name: str, check: Callable[[int], object]) -> Finding:
    """Return the numbers of ranks for which `check` raises no ValueError, or the first sentence that it raises."""
    tried = {count: _tried(area, name, partial(check, count), str(count)) for count in RANKS}
    good = [found.detail for found in tried.values() if found.state is State.OK]
    return _yes(area, name, ", ".join(good)) if good else tried[RANKS[0]]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"
