"""Provides tiny models, random rows, steps computed by hand and runs over ranks to the tests of the backends."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headrace.actors.adapters.spec import tensor_names
from headrace.actors.protocols import ROLLOUT_SCHEMA
from headrace.actors.train.topology import Topology
from headrace.actors.train_backend import MicroBatch, TrainBackend
from headrace.codecs.batch import Batch, Jagged, Ragged
from headrace.codecs.schema import Schema
from headrace.codecs.tokens.masks import MASK_FIELD, MASKS, encode_sets, without_sets
from headrace.trainers.backends.config import BackendConfig, TrainerConfig
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.losses.config import LossConfig

VOCAB = 23
TEMPERATURE = 1.3
COLUMNS = ("rollout_logprobs", "prev_logprobs", "ref_logprobs")
MEASURED = {"train/tokens_per_s", "train/tflops", "memory/peak_gib"}
"""Metrics whose values depend on the clock or the machine."""


@dataclass(frozen=True)
class Row:
    """One row of the train partition, unpacked."""

    ids: np.ndarray
    mask: np.ndarray
    columns: dict[str, np.ndarray]
    advantage: float
    group: int
    sets: np.ndarray | None = None
    """Tokens from which each token was drawn, bool `[L, VOCAB]`; None for the whole vocabulary."""


TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def save_tiny_model(folder: Path, *, tied: bool = True) -> str:
    """Write a random 2-layer Qwen3 as a HF folder."""
    torch.manual_seed(3)
    Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=tied)).save_pretrained(folder)
    return str(folder)


def save_tiny_moe(folder: Path) -> str:
    """Write a random Qwen3-MoE as a HF folder: a dense layer, then one with 4 experts of which a token uses 2. The rows
    contain its padding token."""
    torch.manual_seed(3)
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(**{**TINY, "pad_token_id": 5}, **experts, mlp_only_layers=[0], tie_word_embeddings=False)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


def save_tiny_llama(folder: Path) -> str:
    """Write a random 2-layer Llama with biases as a HF folder. The rows contain its padding token, which is in the
    second half of the vocabulary."""
    torch.manual_seed(3)
    biases: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, "pad_token_id": 15}, **biases, tie_word_embeddings=False))
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(param, std=0.1)
    model.save_pretrained(folder)
    return str(folder)


def random_matrices(model: Any, layers: Sequence[str], rank: int) -> dict[str, torch.Tensor]:
    """Make matrices A and B of linear layers of a HF model, by their names in PEFT's format. No B is zero."""
    torch.manual_seed(11)
    tensors = {}
    for name in layers:
        layer, (first, second) = model.get_submodule(name), tensor_names(name)
        tensors[first] = torch.randn(rank, layer.in_features) * 0.2
        tensors[second] = torch.randn(layer.out_features, rank) * 0.2
    return tensors


def random_rows(seed: int, num: int) -> list[Row]:
    """Make rows of 3 to 14 tokens in groups of 4, with log-probs like a random policy's; every fifth row has failed."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(num):
        prompt, response = int(rng.integers(1, 6)), int(rng.integers(2, 9))
        mask = np.array([0] * prompt + [1] * response, np.uint8)
        mask[prompt + 1] = index % 3 > 0  # a token in between that the policy did not choose
        if index % 5 == 4:
            mask[:] = 0
        columns = {name: (rng.normal(-np.log(VOCAB), 0.1, len(mask)) * mask).astype(np.float32) for name in COLUMNS}
        ids = rng.integers(3, VOCAB, len(mask)).astype(np.int32)
        rows.append(Row(ids, mask, columns, float(np.float32(rng.normal())), index // 4))
    return rows


def masked(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with sets from which the policy's tokens were drawn, some of one token; every third has none."""
    found = []
    for index, row in enumerate(rows):
        rng = np.random.default_rng(index)
        sets = rng.random((len(row.ids), VOCAB)) < rng.choice([0.0, 0.3, 0.9], (len(row.ids), 1))
        sets[np.arange(len(row.ids)), row.ids] = True
        found.append(row if index % 3 == 1 else replace(row, sets=sets))
    return found


def stream_of(row: Row) -> np.ndarray:
    """Return the row's sets as rows carry them."""
    if row.sets is None:
        return without_sets(len(row.ids))
    chosen = row.mask > 0
    counts = np.where(chosen, row.sets.sum(-1), -1)
    return encode_sets(row.ids, row.sets[chosen].nonzero()[1], counts)


def poisoned_row() -> Row:
    """Return a row of two tokens whose loss has no finite gradient."""
    zeros = {name: np.zeros(2, np.float32) for name in COLUMNS}
    return Row(np.array([3, 4], np.int32), np.array([0, 1], np.uint8), zeros, float("nan"), 0)


def flat_gradients(backend: FsdpBackend, chunks: Sequence[Sequence[Row]]) -> torch.Tensor:
    """Return the flat summed gradient of a step with a microbatch per chunk, which is then aborted."""
    return flat(gradients_of(backend, [micro_batch(chunk) for chunk in chunks]))


def gradients_of(backend: Any, micros: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Return the summed gradients of a step, which is then aborted."""
    backend.begin_step(TEMPERATURE)
    backend.accumulate(iter(micros), len(micros))
    found = summed_gradients(backend)
    backend.abort_step()
    return found


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([grad.flatten() for grad in gradients.values()])


def micro_batch(rows: Sequence[Row], columns: Sequence[str] = COLUMNS) -> MicroBatch:
    """Pack `rows` into a batch with the named log-prob columns."""
    lengths = np.array([len(row.ids) for row in rows], np.int64)
    schema = ROLLOUT_SCHEMA.subset(("input_ids", "response_mask", *columns))
    parts = {name: [row.columns[name] for row in rows] for name in columns}
    parts |= {"input_ids": [row.ids for row in rows], "response_mask": [row.mask for row in rows]}
    packed: dict[str, Any] = {}
    for name, field in schema.items():
        values = torch.from_numpy(np.concatenate(parts[name])) if rows else torch.zeros(0, dtype=field.dtype)
        packed[name] = Jagged(values, lengths)
    if any(row.sets is not None for row in rows):
        streams = [stream_of(row) for row in rows]
        shapes = np.array([[len(one)] for one in streams], np.int64)
        packed[MASKS] = Ragged(torch.from_numpy(np.concatenate(streams)), shapes)
        schema = Schema([*schema.values(), MASK_FIELD])
    groups = np.array([row.group for row in rows], np.int64)
    tokens = np.array([int(row.mask.sum()) for row in rows], np.int64)
    return MicroBatch(
        Batch(schema, len(rows), packed), lengths, np.array([row.advantage for row in rows], np.float32), groups,
        np.array([tokens[groups == group].sum() for group in groups], np.int64), tokens,
    )  # fmt: skip


def backend_config(model: str, **changes: Any) -> BackendConfig:
    """Make a config in whose metrics every part of a step shows. It has large steps, tight clip bounds and a small
    clipping norm.

    changes: fields of BackendConfig, keys of TrainerConfig, or a `topology`.
    """
    own = {"loss": LossConfig(clip_low=0.1, clip_high=0.15, kl_coef=0.05), "prev": "recompute", "with_reference": True}
    keys = {"lr": 2e-3, "weight_decay": 0.1, "grad_clip": 0.05, "warmup_steps": 2}
    mesh = asdict(changes.pop("topology", Topology(1)))
    own |= {name: changes.pop(name) for name in list(changes) if name in BackendConfig.__dataclass_fields__}
    return BackendConfig(model, TrainerConfig.model_validate({**keys, **mesh, **changes}), **own)


def summed_gradients(backend: Any) -> dict[str, torch.Tensor]:
    """Return the open step's gradients, full and unscaled. Collective with fsdp; of one rank with megatron."""
    if hasattr(backend._policy, "decoder"):
        return {name: param.main_grad.clone() for name, param in backend._policy.named_parameters()}
    return {
        name: param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad.clone()
        for name, param in backend._policy.model.named_parameters()
        if param.grad is not None
    }


def logprobs_of(backend: FsdpBackend, micro: MicroBatch, **options: Any) -> torch.Tensor:
    """Return the log-probs of one microbatch as a packed column."""
    [column] = backend.logprobs([micro], 1, **options)
    return column


def weights_of(backend: TrainBackend) -> dict[str, torch.Tensor]:
    """Return copies of all weights on rank 0 and {} elsewhere, checking them against `weight_specs`. Collective."""
    specs, kept, names = backend.weight_specs(), {}, []
    for name, tensor in backend.weights():
        names.append(name)
        assert tensor.dtype == specs[name][0] and not tensor.requires_grad
        if tensor.numel():
            assert tuple(tensor.shape) == specs[name][1] and tensor.is_contiguous()
            kept[name] = tensor.to("cpu", copy=True)
    assert names == list(specs)
    return kept


def run_step(backend: TrainBackend, chunks: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Run one train step with a microbatch per chunk. Returns its metrics without those that depend on the clock or the
    machine."""
    backend.begin_step(TEMPERATURE)
    for chunk in chunks:
        backend.accumulate([micro_batch(chunk)], 1)
    return {name: value for name, value in backend.finish_step().items() if name not in MEASURED}


def assert_same_step(got: dict[str, float], expected: dict[str, float]) -> None:
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)


def run_on_ranks(scenario: Callable[..., Any], world: int, folder: Path, *arguments: Any) -> list[Any]:
    """Run `scenario(rank, world, *arguments)` in `world` processes joined by gloo. Returns each rank's result, by
    rank."""
    folder.mkdir(parents=True, exist_ok=True)
    start_processes(_rank, (world, str(folder), scenario, arguments), world, start_method="forkserver")
    return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, scenario: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    torch.save(scenario(rank, world, *arguments), f"{folder}/result.{rank}")
    dist.destroy_process_group()


CLIP_LOW, CLIP_HIGH, KL_COEF = 0.1, 0.15, 0.05
LR, WEIGHT_DECAY, MAX_NORM, WARMUP = 2e-3, 0.1, 0.05, 2


def mismatch_of(rows: Sequence[Row], trainer: Sequence[np.ndarray]) -> dict[str, float]:
    """Compute the mismatch metrics of a step in float64, from the log-probs `trainer` of the tokens of `rows`."""
    deltas = [
        (ours.astype(np.float64) - row.columns["rollout_logprobs"])[row.mask > 0]
        for row, ours in zip(rows, trainer, strict=True)
    ]
    delta = np.concatenate(deltas)
    return {
        "logprob/mismatch_mean": np.abs(delta).mean(),
        "logprob/mismatch_max": np.abs(delta).max(),
        "logprob/mismatch_kl": (np.exp(delta) - 1 - delta).mean(),
    }


def recomputed_mismatch(rows: Sequence[Row]) -> dict[str, float]:
    """Compute the mismatch metrics of a step with `prev` "recompute"."""
    return mismatch_of(rows, [row.columns["prev_logprobs"] for row in rows])


class ReferenceTrainer:
    """Trains with the formulas of `backend_ranks.backend_config` in their plainest form."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        named = list(self.model.named_parameters())
        biases = [param for name, param in named if param.ndim < 2 or name.endswith("bias")]  # experts' are stacked
        matrices = [param for name, param in named if param.ndim >= 2 and not name.endswith("bias")]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": biases, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR)
        self.steps = 0

    def row_logprobs(self, row: Row, temperature: float = TEMPERATURE) -> torch.Tensor:
        """Return the log-probs of the row's tokens, float32 `[L]`, 0 at the first token."""
        ids = torch.from_numpy(row.ids).long()
        logits = self.model(input_ids=ids[None]).logits[0, :-1] / temperature
        if row.sets is not None:
            logits = logits.masked_fill(torch.from_numpy(~row.sets[1:]), -torch.inf)
        picked = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        return torch.cat([torch.zeros(1), picked])

    def loss_sum(self, rows: Sequence[Row]) -> tuple[torch.Tensor, int]:
        """Return (summed loss, number of response tokens) of a row."""
        total, tokens = torch.zeros(()), 0
        for row in rows:
            mask = torch.from_numpy(row.mask).bool()
            now = self.row_logprobs(row)[mask]
            ratio = torch.exp(now - torch.from_numpy(row.columns["prev_logprobs"])[mask])
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            gain = torch.minimum(ratio * row.advantage, clipped * row.advantage)
            delta = torch.from_numpy(row.columns["ref_logprobs"])[mask] - now
            total = total + (-gain + KL_COEF * (delta.exp() - delta - 1)).sum()
            tokens += int(mask.sum())
        return total, tokens

    def step(self, rows: Sequence[Row]) -> tuple[float, float]:
        """Take one optimizer step; returns (loss, gradient norm before clipping)."""
        total, tokens = self.loss_sum(rows)
        loss = total / tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = LR * min(1.0, (self.steps + 1) / WARMUP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.item(), norm.item()
