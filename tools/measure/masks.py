"""`python tools/measure/masks.py CONFIG` trains a recipe with top-p and top-k, and from all tokens, and compares both.

Each seed trains twice, with the same configuration but for the sampling: once from all tokens, once with
`rollout.top_p=0.95` and `rollout.top_k=64`, whose sampling masks the trainer replays. The table has the mismatch of
the log-probs of engine and trainer, the bytes of the masks and the rewards. The program ends with the status 1 if a
step was skipped, or if the masks make `logprob/mismatch_kl` more than 1.2 times as large.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VARIANTS: dict[str, tuple[str, ...]] = {"all": (), "cut": ("rollout.top_p=0.95", "rollout.top_k=64")}
MOST = 1.2
"""Largest sound ratio of the two mismatches."""
ROWS = (
    "logprob/mismatch_kl", "logprob/mismatch_mean", "logprob/mismatch_max", "logprob/ratio_error", "train/entropy",
    "train/sampled_entropy", "train/grad_norm", "masks/ids_per_token", "masks/bytes_per_token", "masks/cut_share",
    "masks/single_share", "rollout/tokens_per_s", "time/step_s",
)  # fmt: skip
"""Metrics of the table, each with its median over the steps."""


def trained(config: str, folder: Path, seed: int, overrides: Sequence[str]) -> list[dict[str, float]]:
    """Train once, and return the metrics of the steps. Ends this program with the status of a run that fails, which has
    said why."""
    command = [sys.executable, "-m", "headrace.cli", "train", config, f"run.dir={folder}", f"run.seed={seed}"]
    if status := subprocess.run([*command, *overrides]).returncode:
        sys.exit(status)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "logprob/mismatch_kl" in line]


def median(steps: Sequence[dict[str, float]], name: str) -> float:
    """Return the median of a metric over the steps that have it; NaN if none has."""
    return statistics.median([step[name] for step in steps if name in step] or [math.nan])


def reward(steps: Sequence[dict[str, float]], *, last: bool) -> float:
    """Return the mean reward of the first or the last quarter of the steps."""
    size = max(1, len(steps) // 4)
    return statistics.fmean(step["reward/mean"] for step in (steps[-size:] if last else steps[:size]))


def main() -> int:
    """Train, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="configuration of the recipe")
    parser.add_argument("overrides", nargs="*", help="further KEY=VALUE of all runs")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    parser.add_argument("--out", default="masks", help="folder of the runs' folders (default: masks)")
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    rewards: dict[str, list[str]] = {name: [] for name in VARIANTS}
    for seed in range(given.seeds):
        for name, own in VARIANTS.items():
            folder = Path(given.out) / f"{name}-{seed}"
            steps = trained(given.config, folder.absolute(), seed, [*given.overrides, *own])
            found[name] += steps
            rewards[name].append(f"{reward(steps, last=False):.3f} -> {reward(steps, last=True):.3f}")
    print("| | " + " | ".join(VARIANTS) + " |\n|---|" + "---|" * len(VARIANTS))
    for row in ROWS:
        print(f"| {row} | " + " | ".join(f"{median(steps, row):.4g}" for steps in found.values()) + " |")
    print("| reward/mean, first to last quarter | " + " | ".join(map(", ".join, rewards.values())) + " |")
    ratio = median(found["cut"], "logprob/mismatch_kl") / median(found["all"], "logprob/mismatch_kl")
    skipped = sum(step["train/skipped"] for step in found["cut"])
    print(
        f"mismatch_kl with masks: {ratio:.2f} times that from all tokens, expected at most {MOST}; skipped: {skipped:g}"
    )
    return int(not ratio <= MOST or skipped > 0)


if __name__ == "__main__":
    sys.exit(main())
