"""The trainer of the GPU weight benchmark publishes a real model with new random weights at every version.

It plays the part of train rank 0, which has all weights, and publishes them as a train worker does. Its forward pass
computes the log-probs that are expected for an engine's tokens, and its weights are the bytes that are expected in an
engine's parameters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch._C._distributed_c10d import FileStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ...actors.weight_sync.config import SyncConfig
from ...actors.weight_sync.publisher import WeightPublisher
from ...actors.weight_sync.transports.factory import build_sender
from ...actors.weight_sync.transports.protocol import ReceiverGroup, SenderConfig, WeightUpdate
from ...codecs import messages
from ...codecs.memory import flat_bytes
from ...codecs.weights.gpu_scatter import device_digest
from .vllm_transfers import BuiltinSender

CONTEXT = 2048
MAX_NUM_SEQS = 64
KV_CACHE_BYTES = 4 << 30
LARGE: dict[str, Any] = dict(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)
"""Dimensions of Qwen3-1.7B with untied embeddings, 2.03 G parameters."""
EIGHT: dict[str, Any] = LARGE | dict(
    hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32
)
"""Dimensions of Qwen3-8B, 8.19 G parameters."""
TINY: dict[str, Any] = LARGE | dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=32
)
TINY["num_key_value_heads"] = 2
EXPERTS: dict[str, Any] = TINY | dict(
    model_type="qwen3_moe", hidden_size=256, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2
)
MODELS = {"2B": LARGE, "8B": EIGHT, "tiny": TINY, "moe": EXPERTS}


@dataclass(frozen=True, slots=True)
class TrainerTask:
    """Settings of one trainer process of the GPU weight benchmark."""

    folder: str
    """Folder of the model's configuration."""
    device: str
    """Device of the weights, such as `cuda:0`."""
    dtype: str
    """Name of the weights' dtype."""
    run_id: str
    rank: int = 0
    """Rank among the trainers, for the broadcast that measures the hardware's limit."""
    key: bytes = field(default=b"", repr=False)
    """Key that the trainer and the engine prove to each other that they know."""
    from_host: bool = False
    """True if each version is kept in pinned host memory first and sent from there, as to an engine of a pool that
    wakes."""


def save_config(size: str, folder: Path, dtype: str) -> None:
    """Write a model's folder without weights, but with a tokenizer, which vLLM requires."""
    options = dict(MODELS[size])
    config = AutoConfig.for_model(
        options.pop("model_type"),
        **options,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype=dtype,
    )
    config.architectures = ["Qwen3MoeForCausalLM" if size == "moe" else "Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)


class Trainer:
    """Holds the model in a trainer process and serves the driver's calls (see `Peer`)."""

    def __init__(self, task: TrainerTask) -> None:
        self.task = task
        self.device = torch.device(task.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        config = AutoConfig.from_pretrained(task.folder)
        with torch.device(self.device):
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, task.dtype)).eval()
        self._weights = {name: one.detach() for name, one in self._model.named_parameters()}
        self._specs = {name: (one.dtype, tuple(one.shape)) for name, one in self._weights.items()}
        self._version = -1
        self._publisher: WeightPublisher | None = None
        self._num_publishers = 0
        self._flat: torch.Tensor | None = None
        self._builtin = BuiltinSender(self._weights)

    def ready(self) -> int:
        """Set the weights to version 0, and return their number of bytes."""
        self.change(0)
        return sum(one.nbytes for one in self._weights.values())

    def save(self) -> None:
        """Write the weights into the model's folder."""
        self._model.save_pretrained(self.task.folder)

    def change(self, version: int) -> None:
        """Set the weights to `version`: random numbers that differ from those of every other version."""
        generator = torch.Generator(self.device)
        for number, tensor in enumerate(self._weights.values()):
            generator.manual_seed(version << 16 | number)
            tensor.normal_(generator=generator)
            if tensor.ndim == 1:
                tensor.mul_(0.1).add_(1.0)
            else:
                tensor.mul_(tensor.shape[-1] ** -0.5)
        self._version = version
        self._keep()
        self._wait()

    def _keep(self) -> None:
        """Write the weights into the publisher's host memory, with `from_host` and where there is a publisher."""
        if self.task.from_host and self._publisher is not None:
            self._publisher.cache(self._version, self._specs, iter(self._weights.items()))

    # ---------------------------------------------------------------- publishing

    def publisher(self, kind: str, bucket_bytes: int, timeout_s: float) -> None:
        """Create the publisher that from now on sends the weights through the given transport. With `from_host` it has
        the present version in host memory."""
        self.close()
        self._num_publishers += 1
        sender = SenderConfig(
            run_id=f"{self.task.run_id}-{self.task.rank}-{self._num_publishers}",
            sync=SyncConfig(timeout_s=timeout_s),
            device=self.task.device,
            key=self.task.key,
        )
        self._publisher = WeightPublisher(
            build_sender(kind, sender), sender.sync, bucket_bytes, keep_versions=self.task.from_host
        )
        self._keep()

    def open(self, version: int, num_workers: int) -> bytes:
        assert self._publisher is not None
        receivers = [ReceiverGroup("engine", num_workers)]
        return messages.encode(self._publisher.open(version, self._specs, receivers, cached=self.task.from_host))

    def publish(self, update: bytes) -> dict[str, float]:
        """Send the weights, and return the seconds of each phase."""
        assert self._publisher is not None
        opened = messages.decode(update, WeightUpdate)
        if self.task.from_host:
            report = self._publisher.publish_cached(opened)
        else:
            report = self._publisher.publish(opened, iter(self._weights.items()))
        return {"fill_s": report.fill_s, "send_s": report.send_s, "gather_s": report.gather_s}

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    # ---------------------------------------------------------------- vLLM's own transfers

    def builtin(self, method: str, *args: Any) -> Any:
        """Call a method of the BuiltinSender, which sends the weights with vLLM's own transfers."""
        return getattr(self._builtin, method)(*args)

    # ---------------------------------------------------------------- checks

    def digests(self, tp: int, exact: bool) -> list[dict[str, str]]:
        """Return the digests that the parameters of each of an engine's `tp` workers must have, by vLLM's names."""
        return [digests(expected_parameters(self._weights, rank, tp), exact) for rank in range(tp)]

    def logprobs(self, version: int, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-prob of every token but the first of each sequence under `version`, float32 `[L - 1]`."""
        self.change(version)
        found = []
        for ids in sequences:
            tokens = torch.tensor([list(ids)], device=self.device)
            with torch.no_grad():
                scores = self._model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
            found.append(scores.gather(1, tokens[0, 1:, None])[:, 0].cpu().numpy())
        return found

    # ---------------------------------------------------------------- limits

    def join(self, path: str, world: int) -> None:
        """Join the default process group of the trainers, for `broadcast`."""
        kind = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(kind, store=FileStore(path, world), rank=self.task.rank, world_size=world)

    def leave(self) -> None:
        self._flat = None
        dist.destroy_process_group()

    def broadcast(self, num_bytes: int) -> float:
        """Take part in one broadcast of `num_bytes` bytes from rank 0 into warm memory, and return its seconds."""
        if self._flat is None:
            self._flat = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
            dist.broadcast(self._flat[:1], 0)
        dist.barrier()
        self._wait()
        start = time.perf_counter()
        dist.broadcast(self._flat, 0)
        self._wait()
        return time.perf_counter() - start

    def copies(self, num_bytes: int, device: str, repeats: int) -> list[float]:
        """Copy `num_bytes` bytes to warm memory on `device` several times, and return the seconds of each copy."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(repeats + 1):
            self._wait()
            start = time.perf_counter()
            target.copy_(source)
            self._wait()
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def expected_parameters(weights: Mapping[str, torch.Tensor], rank: int, tp: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the vLLM name and the value of every parameter that worker `rank` of `tp` must have. They are computed from
    the Hugging Face weights."""

    def rows(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(tp, dim)[rank]

    for name, tensor in weights.items():
        if name.endswith("q_proj.weight"):
            parts = [weights[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            yield name.replace("q_proj", "qkv_proj"), torch.cat([rows(part) for part in parts])
        elif name.endswith("mlp.gate_proj.weight"):
            parts = [tensor, weights[name.replace("gate_proj", "up_proj")]]
            yield name.replace("gate_proj", "gate_up_proj"), torch.cat([rows(part) for part in parts])
        elif name.endswith("experts.gate_up_proj"):
            halves = [rows(half, 1) for half in tensor.chunk(2, 1)]
            yield name.replace("gate_up_proj", "w13_weight"), torch.cat(halves, 1)
        elif name.endswith("experts.down_proj"):
            yield name.replace("down_proj", "w2_weight"), rows(tensor, 2)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            yield name, rows(tensor, 1)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            yield name, rows(tensor)
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            yield name, tensor


def digests(parameters: Iterator[tuple[str, torch.Tensor]], exact: bool) -> dict[str, str]:
    """Return a digest of each parameter's bytes, by name.

    exact: True for xxh3 on the CPU, which takes a second or two; False for `device_digest`, which takes a GPU 5 ms.
    """
    found, host = {}, torch.empty(0, dtype=torch.uint8)
    for name, one in parameters:
        flat = flat_bytes(one.contiguous())
        if exact:
            if len(host) < len(flat):
                host = torch.empty(len(flat), dtype=torch.uint8)
            found[name] = xxhash.xxh3_128_hexdigest(host[: len(flat)].copy_(flat).numpy().data)
        else:
            found[name] = str(int(device_digest(flat)))
    return found


def parameter_digests(worker: Any, exact: bool) -> dict[str, str]:
    """Return the digests of all parameters of a vLLM worker; the function is sent to the worker and called there."""
    model = worker.model_runner.get_model()
    return digests(((vllm_name(name), one) for name, one in model.named_parameters()), exact)


def vllm_name(name: str) -> str:
    """Return a parameter's name without the part that some versions of vLLM put after `experts.`."""
    return re.sub(r"(?<=\bexperts\.).*\.", "", name)
