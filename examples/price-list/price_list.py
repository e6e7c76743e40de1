"""An environment of several turns: the policy looks up prices, one a turn, and then adds them.

    What do the items 482 and 307 cost together?            price 482
    17                                                      price 307
    25                                                      17 + 25 = 42

Prices follow from a digest of the item's number, so that they cannot be learned: without the list the policy guesses.
"""

import re
from hashlib import sha256


def price(item: str, most: int) -> int:
    """Return the price of an item, from 1 to `most`."""
    return 1 + int.from_bytes(sha256(item.encode()).digest()[:4], "big") % most


class PriceList:
    """Answers each turn of the form `price N` with a price, and judges the last number of the first other turn."""

    def __init__(self, most: int = 49, max_turns: int = 5, answers: bool = True) -> None:
        """most: highest price. max_turns: largest number of turns of the policy. answers: False withholds the prices,
        to measure what the policy can do without them."""
        self._most, self._max_turns, self._answers = most, max_turns, answers

    async def play(self, episode) -> float:
        said = (await episode.generate()).text
        for _ in range(self._max_turns - 1):
            call = re.fullmatch(r"price (\d+)", said.strip())
            if call is None:
                break
            answer = str(price(call[1], self._most)) if self._answers else "unknown"
            said = (await episode.say([{"role": "user", "content": answer}])).content
        items = re.findall(r"\d+", episode.prompt.text)
        found = re.findall(r"\d+", said)
        return float(bool(found) and int(found[-1]) == sum(price(item, self._most) for item in items))


class DigitPriceList:
    """The same with one item for the tiny model, which knows only digits and letters.

    r482=     284     the item's number backwards asks for its price
    c617=     617     the price, which the policy repeats
    """

    def __init__(self, answers: bool = True) -> None:
        """answers: as in `PriceList`."""
        self._answers = answers

    async def play(self, episode) -> float:
        item = episode.prompt.text[1:-1]
        asked = (await episode.generate(max_new_tokens=6)).text
        wanted = str(price(item, 900) + 99)
        episode.add_text(f"c{wanted}=" if self._answers and asked == item[::-1] else "c=")
        said = (await episode.generate(max_new_tokens=5)).text
        episode.reward(float(said == wanted), "right")
        return share(said, wanted)  # A right beginning counts, too: at first the policy says nothing.


def share(said: str, wanted: str) -> float:
    """Return the share of characters at which two texts agree."""
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / max(len(said), len(wanted))
