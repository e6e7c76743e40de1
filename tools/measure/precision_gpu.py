"""`python tools/measure/precision_gpu.py` compares engines with 8-bit weights with bfloat16, on one GPU.

    rollout    tokens/s of 512 samples at a time, the median of the repeats
    sync       bytes that a version has, and milliseconds from the trainer's weights to the engine that serves them
    proof      weights whose bytes are compared in the engine with the trainer's, after the last sync
    mismatch   difference of the engine's and the trainer's log-probs, and the weights that `loss.correction=tis` gives

The trainer has the same weights in float32 and computes in bfloat16, in this process. The weights are random.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headrace
from headrace import Field, Kind, MicroBatch, SamplingParams, Schema
from headrace.bench.models import SHAPES, FolderTask, make_folder
from headrace.bench.records import conditions, table, write_records, write_summary
from headrace.cli.arguments import Parser, expect_gpus, results_folder
from headrace.cli.command import ended
from headrace.cli.terminal import new_console, show_results, status_line
from headrace.codecs.jagged import pack
from headrace.codecs.weights.parameter_digests import DigestTaker

PROMPT = 128
TRUNCATED = 2.0
"""Upper bound of the importance weights of `loss.correction=tis`."""
SCHEMES = ("none", "fp8", "fp8_block", "int8")
COLUMNS = {"input_ids": torch.int32, "response_mask": torch.uint8, "rollout_logprobs": torch.float32}
SCHEMA = Schema([Field(name, Kind.PER_TOKEN, dtype) for name, dtype in COLUMNS.items()])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table for each size, and return the exit code."""
    parser = Parser("tools/measure/precision_gpu.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["0.6b", "4b"], choices=list(SHAPES), help="default: 0.6b 4b")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES, help="default: all")
    parser.add_argument("--kv", default="auto", choices=("auto", "fp8"), help="as rollout.kv_cache_dtype")
    parser.add_argument("--samples", type=int, default=512, metavar="N", help="samples at a time; default: 512")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of a sample; default: 512")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "hf"), help="default: vllm")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: runs/bench-...")
    arguments = parser.parse_args(argv)
    return ended(lambda: measure(arguments))


def measure(arguments: Any) -> int:
    """Measure all sizes and schemes, write the results, and print them. Only tiny models need no GPU."""
    for size in arguments.sizes:
        expect_gpus(int(not size.startswith("tiny")), f"--sizes: got {size}")
    out = results_folder(arguments, "precision")
    out.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    facts = conditions(samples=arguments.samples, tokens=arguments.tokens, kv=arguments.kv)
    for size in arguments.sizes:
        rows: list[dict[str, Any]] = []
        for scheme in arguments.schemes:
            with status_line("starting") as (_, tell), tempfile.TemporaryDirectory() as folder:
                tell(f"{size}: {scheme}")
                rows.append(
                    {"size": size, "scheme": scheme, **asyncio.run(measure_one(arguments, size, scheme, folder))}
                )
            write_records(out / "results.jsonl", [*records, *rows], facts)  # Earlier results are not lost later.
        records += rows
        first = rows[0]
        for row in rows[1:]:
            name = f"precision.{size}.{row['scheme']}"
            summary[f"{name}.tokens_s.vs_{first['scheme']}"] = row["tokens_s"] / first["tokens_s"]
            summary[f"{name}.sync_bytes.vs_{first['scheme']}"] = row["sync_bytes"] / first["sync_bytes"]
        write_summary(out / "summary.json", summary, facts)
        header = [name for name in rows[0] if name != "size"]
        shown = table(f"{size}", header, [[_text(row[name]) for name in header] for row in rows], ("scheme",))
        show_results(new_console(), shown, out)
    return 0


async def measure_one(arguments: Any, size: str, scheme: str, folder: str) -> dict[str, Any]:
    """Return the figures of an engine with 8-bit weights of the kind `scheme`."""
    gpu, path = torch.cuda.is_available(), Path(folder) / size
    task = FolderTask(SHAPES[size], "bfloat16", 10_000, (8, 8), 8)
    await asyncio.to_thread(make_folder, path, task, "cuda" if gpu else "cpu")
    rollout: dict[str, Any] = {"engine": arguments.engine, "quantization": scheme}
    if arguments.engine == "vllm":
        rollout |= {"kv_cache_dtype": arguments.kv, "max_batch": arguments.samples}
    prompt = min(PROMPT, SHAPES[size].positions // 2)
    length = prompt + arguments.tokens
    engine: Any = await asyncio.to_thread(headrace.make_engine, str(path), rollout, max_model_len=length + 1)
    try:
        with closing(headrace.make_backend(str(path), {"mixed_precision": gpu, "lr": 1e-6})) as backend:
            with headrace.WeightSync(backend, engine) as sync:
                times = []
                for version in range(1, arguments.repeats + 2):
                    started = time.perf_counter()
                    await sync.send(version)
                    times.append(time.perf_counter() - started)
                proved = await engine.verify_weights(_digests(engine, backend, arguments.repeats + 1))
            rates, answers = await _generate(engine, arguments, SHAPES[size].tokens, prompt)
            found = _mismatch(backend, answers[: 32 if gpu else 4])
    finally:
        await engine.close()
    specs = backend.weight_specs()
    sent = specs if engine.quantization is None else engine.quantization.specs(specs)
    nbytes = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in sent.values())
    speed = {"tokens_s": statistics.median(rates), "sync_bytes": nbytes}
    way = getattr(engine, "load_way", "")
    sync = {"sync_ms": 1e3 * statistics.median(times[1:]), "way": way, "proved": f"{proved} of {len(sent)}"}
    return {**speed, **sync, **found}


def _digests(engine: Any, backend: Any, version: int) -> Any:
    weights = backend.weights()
    stream = weights if engine.quantization is None else engine.quantization.stream(weights)
    names = backend.weight_specs() if engine.quantization is None else engine.quantization.specs(backend.weight_specs())
    taker = DigestTaker(version, frozenset(names))
    for name, tensor in stream:
        taker.take(name, tensor)
    return taker.result()


async def _generate(engine: Any, arguments: Any, vocabulary: int, length: int) -> tuple[list[float], list[Any]]:
    """Return the tokens/s of each repeat after a first one, and prompts with their answers."""
    random, rates, answers = np.random.default_rng(0), [], []
    params = SamplingParams(max_new_tokens=arguments.tokens, seed=0)
    for repeat in range(arguments.repeats + 1):
        prompts = [random.integers(0, vocabulary, length).tolist() for _ in range(arguments.samples)]
        started = time.perf_counter()
        found = await asyncio.gather(
            *(engine.generate(f"{repeat}-{number}", ids, params) for number, ids in enumerate(prompts))
        )
        seconds = time.perf_counter() - started
        answers = [(ids, one[0]) for ids, one in zip(prompts, found, strict=True)]
        rates.append(sum(len(one.token_ids) for _, one in answers) / seconds)
    return rates[1:], answers


def _mismatch(backend: Any, answers: Sequence[tuple[list[int], Any]]) -> Mapping[str, float]:
    micros = []
    for prompt, answer in answers:
        front, count = np.zeros(len(prompt)), len(answer.token_ids)
        columns = {
            "input_ids": [np.append(prompt, answer.token_ids).astype(np.int32)],
            "response_mask": [np.append(front, np.ones(count)).astype(np.uint8)],
            "rollout_logprobs": [np.append(front, answer.logprobs).astype(np.float32)],
        }
        batch = pack(SCHEMA, columns)
        micros.append(MicroBatch(batch, np.array([len(prompt) + count]), np.ones(1, np.float32), np.zeros(1, np.int64)))
    found = backend.logprobs(micros, len(micros))
    pairs = zip(found, answers, strict=True)
    gap = np.concatenate([one[len(ids) :].float().cpu().numpy() - answer.logprobs for one, (ids, answer) in pairs])
    ratio = np.exp(gap)
    return {
        "mismatch_mean": float(np.abs(gap).mean()),
        "mismatch_max": float(np.abs(gap).max()),
        "largest_ratio": float(ratio.max()),
        "largest_ratio_with_tis": float(np.minimum(ratio, TRUNCATED).max()),
        "mean_ratio": float(ratio.mean()),
        "mean_ratio_with_tis": float(np.minimum(ratio, TRUNCATED).mean()),
        "truncated_share": float((ratio > TRUNCATED).mean()),
    }


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main())
