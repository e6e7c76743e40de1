"""Writes sums.jsonl, the questions of the task `sums` for lm-eval.

Run it as `python examples/lm-eval/make_sums.py`.
"""

import json

import reasoning_gym  # pyright: ignore[reportMissingImports] - the extra `reasoning-gym`

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SEED = 1_000_003  # the held-out part of data.train=reasoning-gym:chain_sum in a run with run.seed=0

with open("sums.jsonl", "w", encoding="utf-8") as file:
    for entry in reasoning_gym.create_dataset("chain_sum", seed=SEED, size=100, **SUMS):
        print(json.dumps({"question": entry["question"], "answer": entry["answer"]}), file=file)
