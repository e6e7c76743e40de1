"""Writes questions to train.jsonl and held_out.jsonl, and worked examples of the form to dialogues.jsonl.

tiny.jsonl has texts for the tiny model, which ask for a price in four ways of which only one is right.

python make_data.py --items 3 --most 49     largest number of items in a question, and highest price
"""

import argparse
import json
import random

from price_list import price

parser = argparse.ArgumentParser()
parser.add_argument("--items", type=int, default=2)
parser.add_argument("--most", type=int, default=49)
given = parser.parse_args()
draw = random.Random(3)


def items() -> list[str]:
    """Return the numbers of two or more items."""
    return [str(number) for number in draw.sample(range(1000), draw.randint(2, given.items))]


def question(chosen: list[str]) -> str:
    return f"What do the items {', '.join(chosen[:-1])} and {chosen[-1]} cost together?"


def dialogue(chosen: list[str]) -> list[dict[str, str]]:
    """Return a dialogue as a good policy would have it, with the prices that the list answers."""
    prices = [price(item, given.most) for item in chosen]
    turns = [("user", question(chosen))]
    for item, found in zip(chosen, prices, strict=True):
        turns += [("assistant", f"price {item}"), ("user", str(found))]
    turns.append(("assistant", f"{' + '.join(map(str, prices))} = {sum(prices)}"))
    return [{"role": role, "content": content} for role, content in turns]


asked = {question(chosen): chosen for chosen in (items() for _ in range(9000))}
texts = list(asked)
files = {
    "train.jsonl": [{"question": text} for text in texts[:5000]],
    "held_out.jsonl": [{"question": text} for text in texts[5000:5500]],
    "dialogues.jsonl": [{"messages": dialogue(asked[text])} for text in texts[5500:8500]],
}


def tiny() -> dict[str, str]:
    """Return the first or the second turn of a dialogue of the tiny model."""
    item, cost = str(draw.randint(10, 9999)), str(draw.randint(100, 999))
    ways = [item[::-1], item, item[1:] + item[0], item[-1] + item[:-1]]
    if draw.random() < 0.5:
        return {"prompt": f"r{item}=", "completion": draw.choice(ways)}
    return {"prompt": f"r{item}={draw.choice(ways)}<eos>c{cost}=", "completion": cost}


files["tiny.jsonl"] = [tiny() for _ in range(30000)]
for name, rows in files.items():
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
