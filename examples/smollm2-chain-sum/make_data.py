"""Writes sums of reasoning-gym: train.jsonl, held_out.jsonl, and traces.jsonl with worked answers, which show the form.

4 - 1 + 25 =     4 - 1 = 3
                 3 + 25 = 28
                 The answer is 28.
"""

import json
import re

import reasoning_gym  # pyright: ignore[reportMissingImports] - the extra `reasoning-gym`

OPTIONS = {"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 2}
SIZES = {"train.jsonl": 5000, "held_out.jsonl": 500, "traces.jsonl": 1000}


def worked(question: str) -> str:
    """Return the steps from left to right, and the answer."""
    first, *others = re.findall(r"[-+]? ?\d+", question.rpartition(":")[2])
    total, lines = int(first.replace(" ", "")), []
    for number in others:
        before, total = total, total + int(number.replace(" ", ""))
        lines.append(f"{before} {number} = {total}")
    return "\n".join([*lines, f"The answer is {total}."])


def row(entry: dict, name: str) -> dict:
    """Return the line of a file for one task."""
    if name != "traces.jsonl":
        return {"question": entry["question"], "answer": entry["answer"]}
    answer = worked(entry["question"])
    assert answer.endswith(f" {entry['answer']}."), entry
    turns = [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


tasks = reasoning_gym.create_dataset("chain_sum", size=3 * sum(SIZES.values()), seed=7, **OPTIONS)
different = iter({entry["question"]: entry for entry in tasks}.values())
for name, size in SIZES.items():
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row(next(different), name)) + "\n" for _ in range(size))
