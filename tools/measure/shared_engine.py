"""`python tools/measure/shared_engine.py` compares one run with two runs that share a vLLM engine by their adapters.

Both have all requests in flight at the same time: `one` sends them all from one seat, `two` half of them from each of
two. Both seats have their adapters in the engine in both cases, and the cases alternate. On a machine without GPU, use
`--size cpu`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from headrace.actors.adapters.base_digest import base_digest
from headrace.actors.adapters.spec import AdapterSlots, AdapterSpec, tensor_names
from headrace.actors.engines.protocol import GenerationEngine, SamplingParams
from headrace.actors.engines.shared.seats import open_seat
from headrace.actors.engines.vllm.engine import VllmEngine
from headrace.actors.engines.vllm.weight_names import WeightNames
from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.publisher import WeightPublisher
from headrace.actors.weight_sync.transports.factory import build_sender
from headrace.actors.weight_sync.transports.protocol import ReceiverConfig, ReceiverGroup, SenderConfig
from headrace.bench.models import SHAPES, FolderTask, Shape, make_folder
from headrace.bench.records import conditions, one_line

NAMES = ("a", "b")
SIZES = SHAPES | {"cpu": Shape(256, 512, 4, 4, 2, 64, vocabulary=4096, tokens=4000, positions=1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="4b", choices=sorted(SIZES), help="shape of the base model")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--requests", type=int, default=128, help="number of requests in flight")
    parser.add_argument("--tokens", type=int, default=256, help="number of tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements of each case")
    asked = parser.parse_args()
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_folder(model, FolderTask(SIZES[asked.size], "bfloat16", 1 << 20, (16, 48), 64), "cuda" if gpu else "cpu")
        engine = VllmEngine(
            str(model),
            dtype=torch.bfloat16 if gpu else torch.float32,
            max_num_seqs=asked.requests,
            kv_cache_bytes=None if gpu else 256 << 20,
            max_model_len=64 + asked.tokens,
            adapters=AdapterSlots(asked.rank, 2 * len(NAMES)),
        )
        with asyncio.Runner() as runner:
            rates = runner.run(measure(engine, str(model), Path(folder), asked))
            runner.run(engine.close())
    one, two = (statistics.median(rates[case]) for case in ("one", "two"))
    print(f"one run: {one:,.0f} tokens/s; two runs: {two:,.0f} tokens/s; two / one: {two / one:.3f}")
    print({case: [round(rate) for rate in found] for case, found in rates.items()})
    print(one_line(conditions(**vars(asked))))


async def measure(engine: VllmEngine, model: str, folder: Path, asked: argparse.Namespace) -> dict[str, list[float]]:
    """Return the tokens per second of each measurement, by case."""
    seats = [open_seat("vllm", engine, name, ReceiverConfig(name, SyncConfig()), 0) for name in NAMES]
    for seed, (name, seat) in enumerate(zip(NAMES, seats, strict=True)):
        await serve(
            seat, name, adapter(model, asked.rank, seed), AdapterSpec(asked.rank, 32.0, base_digest(model)), folder
        )
    rates: dict[str, list[float]] = {"one": [], "two": []}
    for turn in range(asked.rounds + 1):
        for case, used in (("one", [seats[0]] * 2), ("two", seats)):
            rate = await generate(used, asked.requests, asked.tokens, f"{turn} {case}")
            if turn:  # The first turn compiles and captures graphs.
                rates[case].append(rate)
    for seat in seats:
        await seat.close()
    return rates


def adapter(model: str, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return random matrices for all linear layers except the head."""
    generator, names, named = torch.Generator().manual_seed(seed), WeightNames(model), {}
    for module in names.linear:
        if module.startswith("model.layers"):
            outputs, inputs = names.shape(f"{module}.weight")
            first, second = tensor_names(module)
            named[first] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            named[second] = 0.02 * torch.randn(outputs, rank, generator=generator)
    return named


async def serve(
    seat: GenerationEngine, name: str, named: dict[str, torch.Tensor], spec: AdapterSpec, folder: Path
) -> None:
    """Send an adapter to a seat, and compare it there with what was sent."""
    config = SenderConfig(name, SyncConfig(), folder=str(folder / name))
    publisher = WeightPublisher(build_sender("disk", config), config.sync, 64 << 20, adapter=spec)
    specs = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in named.items()}
    update = publisher.open(1, specs, [ReceiverGroup(name, 1)])
    publisher.publish(update, iter(named.items()))
    await seat.prepare_weights(update)
    await seat.commit_weights(1)
    assert await seat.verify_weights(publisher.digests(1)) == len(named)
    publisher.close()


async def generate(seats: list[GenerationEngine], requests: int, tokens: int, name: str) -> float:
    """Send requests to the seats in turn, all at once, and return the tokens per second."""
    params = SamplingParams(max_new_tokens=tokens, temperature=1.0)
    calls: list[Any] = []
    for number in range(requests):
        prompt = [5 + (number * 7919 + place * 31) % 200 for place in range(48)]
        calls.append(seats[number % len(seats)].generate(f"{name} {number}", prompt, params))
    began = time.perf_counter()
    answers = await asyncio.gather(*calls)
    return sum(len(one.token_ids) for answer in answers for one in answer) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
