"""`headrace bench gpu-train` checks a backend's train step on GPUs against float32 on the CPU, then times it.

Needs no Ray. Prints one JSON object per line and writes the lines to FOLDER/gpu_train.jsonl; the exit code is 1 when a
result is wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ..actors.protocols import ROLLOUT_SCHEMA, TRAIN_FIELDS, MicroBatch
from ..actors.train.reader import ReplicaReader
from ..actors.train.step_rows import TrainShard
from ..actors.train.topology import Topology
from ..codecs.batch import Batch, Jagged
from ..dataplane.config import DataPlaneConfig, StoreConfig
from ..dataplane.factory import connect, open_data_plane
from ..trainers.backends.config import BackendConfig, TrainerConfig
from ..trainers.backends.factory import build_backend
from ..trainers.errors import UserError
from ..trainers.losses.config import LossConfig

SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
LARGE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
"""Dimensions of Qwen3-0.6B."""
LOSS = LossConfig(clip_high=0.2)
EXACT, HALF = (2e-4, 2e-3), (5e-2, 5e-2)
"""Largest allowed difference of a log-prob, and largest relative difference of the gradient norm, for float32 (EXACT)
and bfloat16 (HALF)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Random rows that are half prompt and half response."""

    ids: list[np.ndarray]
    """Token ids of each row, int32 `[L]`."""
    logprobs: list[np.ndarray]
    """Invented log-probs of each row's tokens, in place of those of a sampling engine, float32 `[L]`."""
    advantages: np.ndarray
    """Advantage of each row, float32 `[N]`."""


def random_rows(seed: int, lengths: Sequence[int], vocab: int) -> Rows:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(3, vocab, length).astype(np.int32) for length in lengths]
    logprobs = [rng.normal(-math.log(vocab), 0.05, length).astype(np.float32) for length in lengths]
    return Rows(ids, logprobs, rng.normal(size=len(lengths)).astype(np.float32))


def response(length: int, prompt_share: float = 0.5) -> np.ndarray:
    return (np.arange(length) >= max(1, int(length * prompt_share))).astype(np.uint8)


def micro_batch(rows: Rows, picked: Sequence[int], prompt_share: float = 0.5) -> MicroBatch:
    lengths = np.array([len(rows.ids[row]) for row in picked], np.int64)
    masks = [response(length, prompt_share) for length in lengths]
    parts = {
        "input_ids": [rows.ids[row] for row in picked],
        "response_mask": masks,
        "rollout_logprobs": [rows.logprobs[row] * mask for row, mask in zip(picked, masks, strict=True)],
    }
    columns = {name: Jagged(torch.from_numpy(np.concatenate(values)), lengths) for name, values in parts.items()}
    batch = Batch(ROLLOUT_SCHEMA.subset(TRAIN_FIELDS), len(picked), columns)
    return MicroBatch(batch, lengths, rows.advantages[list(picked)], np.array(picked, np.int64), None)


def by_hand(folder: str, rows: Rows) -> tuple[list[torch.Tensor], float, float]:
    """Compute the reference in float32 on the CPU: masked log-probs of each row, loss, and gradient norm. The loss is
    written out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    columns, total, tokens = [], torch.zeros(()), 0
    for ids, sampled, advantage in zip(rows.ids, rows.logprobs, rows.advantages, strict=True):
        row, mask = torch.from_numpy(ids).long(), torch.from_numpy(response(len(ids))).bool()
        every = torch.log_softmax(model(input_ids=row[None]).logits[0, :-1], -1)
        now = torch.cat([torch.zeros(1), every.gather(-1, row[1:, None])[:, 0]])
        ratio = (now - torch.from_numpy(sampled))[mask].exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - LOSS.clip_low, 1 + LOSS.clip_high) * advantage)
        total, tokens = total - gain.sum(), tokens + int(mask.sum())
        columns.append((now * mask).detach())
    (total / tokens).backward()
    norms = [param.grad.norm() for param in model.parameters() if param.grad is not None]
    return columns, float(total.detach()) / tokens, float(torch.stack(norms).norm())


# ---------------------------------------------------------------- on the GPUs


def config(folder: str, topology: Topology, **changes: Any) -> BackendConfig:
    trainer = TrainerConfig.model_validate({"lr": 1e-5, **asdict(topology), **changes})
    return BackendConfig(folder, trainer, LOSS)


def check(rank: int, topology: Topology, folder: str, rows: Rows, **changes: Any) -> dict[str, Any]:
    """Compute all log-probs and one train step on this mesh, then the same step from a checkpoint before it. Returns
    the log-probs, loss, gradient norm, and the relative difference of the repeated gradient norm."""
    gc.collect()  # the last model, which is part of cycles, would count as this one's memory
    backend = build_backend(config(folder, topology, **changes), rank, topology.world)
    columns = backend.logprobs([micro_batch(rows, range(len(rows.ids)))], 1)
    mine = range(topology.place(rank).dp, len(rows.ids), topology.dp)
    backend.save(f"{folder}.saved")
    steps = []
    for _ in range(2):
        backend.begin_step()
        backend.accumulate(iter([micro_batch(rows, mine[:2]), micro_batch(rows, mine[2:])]), 2)
        steps.append(backend.finish_step())
        for _, value in backend.weights():
            assert torch.isfinite(value).all()
        backend.load(f"{folder}.saved")
    backend.close()
    first, again = steps
    return {
        "logprobs": columns,
        "loss": first["train/loss"],
        "norm": first["train/grad_norm"],
        "resumed_off": abs(again["train/grad_norm"] / first["train/grad_norm"] - 1),
    }


def timed(rank: int, topology: Topology, folder: str, micros: int, tokens: int, **changes: Any) -> dict[str, float]:
    """Time four train steps of `micros` microbatches, each of about `tokens` tokens, per replica. Returns the metrics
    of the last step.

    A replica of one rank prefetches its microbatches from a data plane with the store `shm` while it computes, and its
    metrics include the share of the step in which it waited for rows.
    """
    gc.collect()
    backend_config = config(folder, topology, mixed_precision=True, **changes)
    backend = build_backend(backend_config, rank, topology.world)
    rng = np.random.default_rng(topology.place(rank).dp)
    batches: list[MicroBatch] = []
    for index in range(micros):
        lengths = np.clip(rng.lognormal(6.5, 0.7, 4 * tokens // 500), 64, 4096).astype(int)
        size = np.cumsum(lengths)
        if backend_config.trainer.packing == "none":  # padded to the longest, as the planner counts them
            size = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
        lengths = lengths[: max(1, int(np.searchsorted(size, tokens)))]
        rows = random_rows(index, lengths.tolist(), LARGE["vocab_size"])
        batches.append(micro_batch(rows, range(len(lengths))))
    metrics: dict[str, float] = {}
    with ExitStack() as stack:
        source = stack.enter_context(served(batches)) if topology.replica_size == 1 else None
        for _ in range(4):
            started = time.monotonic()
            backend.begin_step()
            backend.accumulate(iter(batches) if source is None else source.rows(), len(batches))
            metrics = backend.finish_step()
            if source is not None:
                metrics["data_wait_share"] = source.wait_s() / (time.monotonic() - started)
    backend.close()
    kept = ("train/tokens_per_s", "train/tflops", "train/mfu", "memory/peak_gib", "train/grad_norm", "train/skipped")
    return {name: metrics[name] for name in (*kept, "data_wait_share") if name in metrics}


@dataclass(frozen=True, slots=True)
class Served:
    """Microbatches stored in a data plane, together with a reader for them."""

    reader: ReplicaReader
    shard: TrainShard

    def rows(self) -> Iterator[MicroBatch]:
        """Read all microbatches from the data plane once more."""
        self.reader.begin(self.shard)
        return self.reader.stream(TRAIN_FIELDS)

    def wait_s(self) -> float:
        """Return the number of seconds that the reader has waited for rows since the last call of this method."""
        return self.reader.take_metrics().wait_s


@contextmanager
def served(batches: Sequence[MicroBatch]) -> Iterator[Served]:
    """Put the rows of `batches` into a data plane of this process, for as long as the context lasts."""
    config = DataPlaneConfig(store=StoreConfig(kind="shm"))
    with open_data_plane(config, in_process=True) as plane, connect(plane.handle) as client:
        client.register("train", ROLLOUT_SCHEMA, ["train"])
        receipts = []
        for number, micro in enumerate(batches):
            keys = [f"{number}.{row}" for row in range(len(micro.lengths))]
            receipts.append(client.put("train", keys, micro.batch).with_tags(advantage=micro.advantages))
        meta = receipts[0].concat(*receipts[1:])
        sizes = np.array([len(micro.lengths) for micro in batches])
        shard = TrainShard(1, meta.to_bytes(), sizes, "timed", False)
        reader = ReplicaReader(client, ROLLOUT_SCHEMA, Topology(1), 0, None, device=torch.device("cpu"))
        yield Served(reader, shard)
        reader.close()


def meshes(backend: str, world: int) -> list[tuple[str, Topology, dict[str, Any]]]:
    """Return the name, the mesh and further trainer settings of each configuration that is measured."""
    more: dict[str, Any] = {"backend": backend}
    found = [(f"dp{world}", Topology(world), more)]
    if world > 1 and backend == "fsdp":
        found.append((f"tp{world}", Topology(1, tp=world), more))
    if world > 1 and backend == "megatron":
        found.append((f"tp{world} sp", Topology(1, tp=world), {**more, "sequence_parallel": True}))
        found.append((f"pp{world}", Topology(1, pp=world), more))
    return found


def run_rank(rank: int, world: int, folder: str, rows: Rows, backend: str, micros: int, tokens: int) -> None:
    """Run all checks and timings of one rank and write them to `folder`/results.`rank`."""
    torch.cuda.set_device(rank)
    address, bound = f"file://{folder}/rendezvous", timedelta(seconds=300)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=world, timeout=bound)
    small, large = f"{folder}/small", f"{folder}/large"
    results: list[tuple[str, Any]] = []
    for mesh_name, mesh, more in meshes(backend, world):
        for packing in ("none", "packed") if backend == "fsdp" else ("packed",):
            name, settings = f"{backend} {mesh_name} {packing}", {**more, "packing": packing}
            for precision in ("off", "bf16"):
                changes = {**settings, "mixed_precision": precision == "bf16"}
                results.append((f"check {name} {precision}", check(rank, mesh, small, rows, **changes)))
                if world > 1 and backend == "fsdp":
                    offloaded = check(rank, mesh, small, rows, **changes, offload=True)
                    results.append((f"check {name} offload {precision}", offloaded))
            for recompute in ("none", "full"):
                speed = timed(rank, mesh, large, micros, tokens, recompute=recompute, **settings)
                results.append((f"speed {name} recompute={recompute}", speed))
    torch.save(results, f"{folder}/results.{rank}")
    dist.destroy_process_group()


def gathered(folder: str, world: int) -> list[tuple[str, Any]]:
    """Load the results of rank 0. Only one rank returns the log-probs of a check, and they are filled in from that
    rank."""
    of_ranks = [torch.load(f"{folder}/results.{rank}", weights_only=False) for rank in range(world)]
    for entries in zip(*of_ranks, strict=True):
        if entries[0][0].startswith("check"):
            entries[0][1]["logprobs"] = next(result["logprobs"] for _, result in entries if result["logprobs"])
    return of_ranks[0]


# ---------------------------------------------------------------- the report


def judged(result: dict[str, Any], columns: list[torch.Tensor], loss: float, norm: float, *, half: bool) -> dict:
    """Compare the result of a check with the reference from the CPU. Returns the differences, and under `right` whether
    they are allowed."""
    most, relative = HALF if half else EXACT
    [ours] = result["logprobs"]
    off = float((ours - torch.cat(columns)).abs().max())
    norm_off = abs(result["norm"] - norm) / norm
    figures = {"logprob_off": off, "norm_off": norm_off, "resumed_off": result["resumed_off"]}
    right = off <= most and max(norm_off, result["resumed_off"]) <= relative
    return {"right": right, **figures, "loss": result["loss"], "loss_by_hand": loss}


def main(arguments: Sequence[str]) -> int:
    """Run all checks and timings with these command-line options. Raises UserError when GPUs are missing."""
    parser = argparse.ArgumentParser(
        "headrace bench gpu-train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs, one rank each; default: 1")
    parser.add_argument("--micros", type=int, default=4, metavar="N", help="microbatches of a timed step; default: 4")
    parser.add_argument(
        "--tokens", type=int, default=16384, metavar="N", help="tokens of a timed microbatch; default: 16384"
    )
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help="folder for the results; default: .")
    parser.add_argument("--backend", choices=("fsdp", "megatron"), default="fsdp", help="default: fsdp")
    options = parser.parse_args(arguments)
    if torch.cuda.device_count() < options.gpus:
        raise UserError(f"--gpus: got {options.gpus}, expected at most the {torch.cuda.device_count()} of this machine")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        for name, shape in (("small", SMALL), ("large", LARGE)):
            Qwen3ForCausalLM(Qwen3Config(**shape, max_position_embeddings=4096)).save_pretrained(f"{folder}/{name}")
        rows = random_rows(1, (40, 7, 150, 91, 2, 300), SMALL["vocab_size"])
        columns, loss, norm = by_hand(f"{folder}/small", rows)
        task = (options.gpus, folder, rows, options.backend, options.micros, options.tokens)
        spawn(run_rank, args=task, nprocs=options.gpus)
        results = gathered(folder, options.gpus)
    lines, right = [{"gpu": torch.cuda.get_device_name(0), "gpus": options.gpus, "torch": torch.__version__}], True
    for name, result in results:
        if name.startswith("check"):
            result = judged(result, columns, loss, norm, half=name.endswith("bf16"))
            right = right and result["right"]
        lines.append({"name": name, **result})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    os.makedirs(options.out, exist_ok=True)
    (options.out / "gpu_train.jsonl").write_text(text)
    sys.stdout.write(text)
    return 0 if right else 1
