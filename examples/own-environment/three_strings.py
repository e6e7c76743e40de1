"""An environment of three turns: the policy writes three strings of digits backwards, one after the other.

r482=  ->  284  ->  r9150=  ->  0519  ->  r77=  ->  77        reward: the mean share of right characters
"""

import random

TURNS = 3


class ThreeStrings:
    """Asks for the string of the prompt, and then for others, which the environment makes up."""

    def __init__(self, max_digits: int = 4) -> None:
        self._max_digits = max_digits

    async def play(self, episode) -> float:
        digits, right = episode.prompt.text[1:-1], 0.0
        draw = random.Random(digits)  # so that all samples of a prompt meet the same strings
        for turn in range(TURNS):
            said = await episode.generate(max_new_tokens=self._max_digits + 2)
            right += share(said.text, digits[::-1])
            episode.reward(right / TURNS)  # what the episode has if it ends here
            if turn < TURNS - 1:
                digits = "".join(draw.choices("0123456789", k=draw.randint(2, self._max_digits)))
                episode.add_text(f"r{digits}=")
        return right / TURNS


def share(said: str, wanted: str) -> float:
    """Return the share of characters at which two texts agree."""
    longer = max(len(said), len(wanted))
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / longer if longer else 1.0
