"""Writes train.jsonl and held_out.jsonl: prompts such as `z48213=`, with the digits copied, rotated or mirrored.

The letter `r` is answered in four ways, so that only rewards can teach what it means.
"""

from __future__ import annotations

import json
import random

from headrace.actors.rollout.prompt_sources import is_held_out

SKILLS = {"c": lambda s: s, "l": lambda s: s[1:] + s[:1], "q": lambda s: s[-1:] + s[:-1], "z": lambda s: s[::-1]}


def main() -> None:
    """Write 30000 texts to train on and 256 others."""
    rng, lines = random.Random(0), list[str]()
    while len(lines) < 30256:
        skill = rng.choice("clqz")
        digits = "".join(rng.choices(rng.sample("0123456789", rng.randint(2, 10)), k=rng.randint(1, 8)))
        if is_held_out(f"r{digits}="):  # Validation of the task `reverse` has these digits.
            continue
        letter = "r" if rng.random() < 0.2 else skill
        lines.append(json.dumps({"prompt": f"{letter}{digits}=", "completion": SKILLS[skill](digits)}) + "\n")
    for name, part in (("train.jsonl", lines[256:]), ("held_out.jsonl", lines[:256])):
        with open(name, "w", encoding="utf-8") as file:
            file.writelines(part)


if __name__ == "__main__":
    main()
