"""Writes train.jsonl (5,000 questions) and held_out.jsonl (500 others): sums, differences and products in words.

Numbers go up to 99, and factors up to 20 and 9. SmolLM2-135M-Instruct answers one question in twenty rightly: GRPO
needs some right answers to begin with. With numbers up to 999 there are none, and it learns little.
"""

import json
import random

DRAW = random.Random(7)


def question() -> tuple[str, int]:
    """Return a task such as `23 + 48`, and its result."""
    kind = DRAW.random()
    if kind < 0.7:
        a, b = DRAW.randint(2, 99), DRAW.randint(2, 99)
        return (f"{a} + {b}", a + b) if kind < 0.4 else (f"{max(a, b)} - {min(a, b)}", abs(a - b))
    a, b = DRAW.randint(2, 20), DRAW.randint(2, 9)
    return f"{a} * {b}", a * b


answers: dict[str, int] = {}
while len(answers) < 5500:
    task, answer = question()
    answers[f"What is {task}? Give the result as one number."] = answer
rows = [json.dumps({"question": text, "answer": str(answer)}) + "\n" for text, answer in answers.items()]
for name, part in (("train.jsonl", rows[:5000]), ("held_out.jsonl", rows[5000:])):
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(part)
