"""Writes traces.jsonl: worked answers to sums of reasoning-gym, from which the model learns the form of an answer.

4 - 1 + 25 =     4 - 1 = 3
                 3 + 25 = 28
                 The answer is 28.
"""

import json
import re

import reasoning_gym

NUM_TRACES = 1024
OPTIONS = {"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 2}


def worked(question: str) -> str:
    """Return the steps from left to right, and the answer."""
    numbers = re.findall(r"[-+]? ?\d+", question.rpartition(":")[2])
    total, lines = int(numbers[0].replace(" ", "")), []
    for number in numbers[1:]:
        sign, value = number[0], int(number[1:])
        result = total + value if sign == "+" else total - value
        lines.append(f"{total} {sign} {value} = {result}")
        total = result
    return "\n".join([*lines, f"The answer is {total}."])


with open("traces.jsonl", "w", encoding="utf-8") as file:
    # Another seed than that of the run, whose questions are others.
    for row in reasoning_gym.create_dataset("chain_sum", size=NUM_TRACES, seed=12345, **OPTIONS):
        text = worked(row["question"])
        assert text.endswith(f" {row['answer']}."), row
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": text}]
        file.write(json.dumps({"messages": turns}) + "\n")
