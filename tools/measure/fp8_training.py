"""`python tools/measure/fp8_training.py` compares train steps in fp8 with bfloat16, on one GPU.

    tokens/s    of whole train steps, the median of the repeats; the layers are compiled
    log-probs   mean and largest difference from those in bfloat16
    gradient    relative error of the whole gradient, and of the weight with the largest error

Weights and rows are random, and rows have various lengths. Each row of the table is written to `results.jsonl` at once.
Rows for which the time does not suffice are left out, and named.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import headrace
from headrace import Field, Kind, MicroBatch, Schema
from headrace.bench.models import SHAPES, Shape, save_config
from headrace.bench.records import conditions, note, table, write_summary
from headrace.cli.arguments import Parser, expect_gpus, results_folder
from headrace.cli.command import ended
from headrace.cli.terminal import new_console, show_results
from headrace.codecs.jagged import pack

RECIPES = ("none", "rowwise", "tensorwise", "rowwise_with_gw_hp")
COLUMNS = {"input_ids": torch.int32, "response_mask": torch.uint8, "rollout_logprobs": torch.float32}
SCHEMA = Schema([Field(name, Kind.PER_TOKEN, dtype) for name, dtype in COLUMNS.items()])
Gradients = dict[str, torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and return the exit code."""
    parser = Parser("tools/measure/fp8_training.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["4b", "0.6b"], choices=list(SHAPES), help="default: 4b 0.6b")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="most decoder layers; default: 12")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES, help="default: all")
    parser.add_argument("--tokens", type=int, default=16_384, metavar="N", help="of a microbatch; default: 16384")
    parser.add_argument(
        "--length", type=int, default=1024, metavar="N", help="tokens of the longest row; default: 1024"
    )
    parser.add_argument("--micros", type=int, default=2, metavar="N", help="microbatches of a step; default: 2")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--seconds", type=float, default=170, help="no row starts that may end later; default: 170")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers, which CPUs never do here")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: runs/bench-...")
    arguments = parser.parse_args(argv)
    return ended(lambda: measure(arguments))


def measure(arguments: Any) -> int:
    """Measure the sizes by each recipe, bfloat16 first, write each result, and print them. Only tiny models need no
    GPU."""
    for size in arguments.sizes:
        expect_gpus(int(not size.startswith("tiny")), f"--sizes: got {size}")
    out, started, longest = results_folder(arguments, "fp8-training"), time.perf_counter(), 0.0
    out.mkdir(parents=True, exist_ok=True)
    facts = conditions(**{name: getattr(arguments, name) for name in ("layers", "tokens", "length", "micros", "eager")})
    note(out / "results.jsonl", conditions=facts)
    plain: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        recipes = [name for name in RECIPES if name in ("none", *arguments.recipes)]
        pairs = [(size, recipe) for some in (recipes[:2], recipes[2:]) for size in arguments.sizes for recipe in some]
        for size, recipe in pairs:
            begun = time.perf_counter()
            if begun - started + longest > arguments.seconds:
                note(out / "results.jsonl", size=size, recipe=recipe, left_out=True)
                print(f"{size} {recipe}: left out, because {arguments.seconds:g} s do not suffice", flush=True)
                continue
            found, logprobs, gradients = measure_one(arguments, size, recipe, Path(folder) / size)
            exact = plain.setdefault(size, (found, logprobs, gradients))
            found |= {"vs_none": found["tokens_s"] / exact[0]["tokens_s"], **errors(logprobs, gradients, *exact[1:])}
            rows.append({"size": size, "recipe": recipe, **found})
            longest = max(longest, time.perf_counter() - begun)
            note(out / "results.jsonl", **rows[-1], seconds=time.perf_counter() - begun)
            print(rows[-1], flush=True)
    summary = {f"fp8_training.{row['size']}.{row['recipe']}.tokens_s.vs_none": row["vs_none"] for row in rows}
    write_summary(out / "summary.json", summary, facts)
    header = list(rows[0])
    cells = [[_text(row[name]) for name in header] for row in rows]
    show_results(new_console(), table("Training in fp8", header, cells, ("size", "recipe")), out)
    return 0


def measure_one(arguments: Any, size: str, recipe: str, path: Path) -> tuple[dict[str, float], torch.Tensor, Gradients]:
    """Return the speed of a recipe, its log-probs, and the gradient of the first step, in host memory."""
    gpu = torch.cuda.is_available()
    shape = dataclasses.replace(SHAPES[size], layers=min(SHAPES[size].layers, arguments.layers))
    if not path.exists():
        make_model(shape, path, "cuda" if gpu else "cpu")
    keys: dict[str, Any] = {
        "fp8": recipe, "mixed_precision": True, "compile": gpu and not arguments.eager, "lr": 0.0, "packing": "packed",
        "tokens_per_microbatch": arguments.tokens,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    micros = [microbatch(rng, shape.tokens, arguments.tokens, arguments.length) for _ in range(arguments.micros)]
    with closing(headrace.make_backend(str(path), keys, {"kind": "reinforce"})) as backend:
        gradients, steps = dict[str, torch.Tensor](), []
        for _ in range(arguments.repeats + 1):
            backend.begin_step()
            backend.accumulate(micros, len(micros))
            gradients = gradients or gradients_of(backend)
            steps.append(backend.finish_step())
        logprobs = torch.cat(backend.logprobs(micros, len(micros)))
    found = {
        "tokens_s": statistics.median(step["train/tokens_per_s"] for step in steps[1:]),
        "mfu_of_bf16": steps[-1].get("train/mfu", float("nan")),
        "peak_gib": steps[-1]["memory/peak_gib"],
    }
    del backend
    if gpu:
        torch.cuda.empty_cache()
    torch._dynamo.reset()
    return found, logprobs, gradients


def gradients_of(backend: Any) -> Gradients:
    """Return the gradients of the open step in bfloat16, whose rounding does not show beside that of fp8."""
    return {name: one.grad.to("cpu", torch.bfloat16) for name, one in backend._policy.model.named_parameters()}


def make_model(shape: Shape, path: Path, device: str) -> None:
    """Write a folder with a random model."""
    save_config(shape, path, "bfloat16")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    model.save_pretrained(path)


def microbatch(rng: np.random.Generator, vocabulary: int, tokens: int, longest: int) -> MicroBatch:
    """Return at most `tokens` random tokens, in rows whose lengths are between half of `longest` and all of it."""
    lengths = list[int]()
    while sum(lengths) + longest <= tokens:
        lengths.append(int(rng.integers(longest // 2, longest + 1)))
    masks = [np.arange(length) >= length // 8 for length in lengths]
    columns = {
        "input_ids": [rng.integers(0, vocabulary, length).astype(np.int32) for length in lengths],
        "response_mask": [mask.astype(np.uint8) for mask in masks],
        "rollout_logprobs": [-np.log(vocabulary) * mask.astype(np.float32) for mask in masks],
    }
    signs = rng.choice([-1.0, 1.0], len(lengths)).astype(np.float32)
    return MicroBatch(pack(SCHEMA, columns), np.array(lengths), signs, np.arange(len(lengths)))


def errors(
    logprobs: torch.Tensor, gradients: Gradients, exact_logprobs: torch.Tensor, exact: Gradients
) -> dict[str, float]:
    """Return the differences from bfloat16."""
    gap = (logprobs - exact_logprobs)[exact_logprobs != 0].abs()
    squares = {name: (value.float().square().sum(), _gap(gradients[name], value)) for name, value in exact.items()}
    total, wrong = (sum(part[index] for part in squares.values()) for index in (0, 1))
    worst = max(float((wrong / own) ** 0.5) for own, wrong in squares.values() if own > 0)
    return {
        "logprob_mean": float(gap.mean()), "logprob_max": float(gap.max()),
        "gradient_error": float((wrong / total) ** 0.5), "worst_weight": worst,
    }  # fmt: skip


def _gap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.float() - other.float()).square().sum()


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
