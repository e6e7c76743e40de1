"""Writes rows that ask how many coloured squares a picture has, one to four, to train.jsonl and held_out.jsonl.

python make_pictures.py
python make_pictures.py --blind     the same rows with pictures that are grey all over, which tell nothing
"""

import argparse
import base64
import io
import json
import random

from PIL import Image

CELL = 28
"""Width of a square in pixels, which one token of the tiny model shows."""
COLOURS = ((220, 40, 40), (40, 160, 60), (50, 80, 220))
WHITE, GREY = (255, 255, 255), (128, 128, 128)


def picture(draw: random.Random, squares: int) -> Image.Image:
    """Return a white picture with this number of squares in the four quarters, each of some colour."""
    image = Image.new("RGB", (2 * CELL, 2 * CELL), WHITE)
    for place in draw.sample(range(4), squares):
        left, top = CELL * (place % 2), CELL * (place // 2)
        image.paste(draw.choice(COLOURS), (left + 3, top + 3, left + CELL - 3, top + CELL - 3))
    return image


def row(draw: random.Random, blind: bool) -> dict:
    squares = draw.randint(1, 4)
    shown = picture(draw, squares)
    file = io.BytesIO()
    (Image.new("RGB", shown.size, GREY) if blind else shown).save(file, "PNG")
    image = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image", "image": image}, {"type": "text", "text": "count squares"}]
    return {"messages": [{"role": "user", "content": content}], "answer": str(squares)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blind", action="store_true")
    blind = parser.parse_args().blind
    for name, count, seed in (("train.jsonl", 4000, 1), ("held_out.jsonl", 200, 2)):
        draw = random.Random(seed)
        with open(name, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row(draw, blind)) + "\n" for _ in range(count))


if __name__ == "__main__":
    main()
