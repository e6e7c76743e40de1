"""An environment whose episodes differ twentyfold in length, for drills over kills.

The policy's first token decides the number of turns, so an episode that is drawn again has another length. Between two
turns, a process of its own answers, which a drill can kill.
"""

from __future__ import annotations

import asyncio

from headrace import SandboxFailed
from headrace.actors.environments.episode import Episode
from headrace.actors.process.user_function_timeouts import UserProcessDied, UserProcesses

LONGEST, SHORTEST = 20, 1
"""Number of turns of a long and of a short episode."""
LONG_OF = 8
"""One of so many first tokens, on average, makes a long episode."""
NUM_PROCESSES = 2


def answer(turn: int) -> str:
    """Return what the environment says after a turn."""
    return str(turn % 10)


class SkewedGame:
    """Plays an episode of one turn, or in one of LONG_OF cases of LONGEST turns."""

    def __init__(self, wait_s: float = 0.2, apart: bool = False) -> None:
        """wait_s: seconds that the environment takes between two turns. apart: True if it answers from a process."""
        self._wait_s = wait_s
        self._processes = UserProcesses(f"{__name__}:answer", {}, NUM_PROCESSES) if apart else None

    async def play(self, episode: Episode) -> float:
        turns = SHORTEST
        for number in range(LONGEST):
            said = await episode.generate(max_new_tokens=4)
            first = episode.token_ids[said.start]
            if not number and not first % LONG_OF:
                turns = LONGEST
            if number + 1 >= turns:
                return float(first % 2)
            await asyncio.sleep(self._wait_s)
            episode.add_text(await self._answer(number))
        raise AssertionError("the last turn returns")

    async def _answer(self, turn: int) -> str:
        if self._processes is None:
            return answer(turn)
        try:
            return await self._processes.call([turn], 30.0)
        except UserProcessDied as error:
            raise SandboxFailed(str(error)) from error

    async def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            await self._processes.close()
