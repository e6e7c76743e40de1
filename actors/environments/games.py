"""The `textarena` environment plays games of the library textarena, which a separate process hosts.

    reset, action -> a line of JSON -> child process: the games of a rollout actor
    what the player reads, rewards <- a line of JSON <-

The policy plays one player, and the other players are played by the policy too, or by a function. The seed of a game
follows from its prompt, so all episodes of a prompt play the same game, and a game that is played again is the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...dataplane.imports import import_object
from ..failures import SandboxFailed
from ..process.user_errors import awaited, contained
from .child_process import ChildProcess, ReplacedChild, check_installed, checked_python, checked_section, import_folders
from .episode import Episode, OutOfTokens

SCRIPT = Path(__file__).with_name("game_child.py")
CLOSE_S = 4.0
"""Seconds within which a process must end a session before it is killed. The host of the episodes waits longer for an
episode that it has cancelled (GRACE_S)."""
POLICY = "policy"
"""Value of `opponent` for players that the policy plays without being trained on their turns."""


def checked_count(name: str, number: Any, *, none: bool = False) -> None:
    """Raise ValueError unless `environment.options.NAME` is a whole number of at least 1, or None where `none`."""
    if not (none and number is None) and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise ValueError(f"environment.options.{name}: got {number!r}, expected a whole number >= 1")


def seed_of(episode: Episode) -> int:
    """Return the seed of the episode's game: the number of its task, or else a digest of the prompt's uid."""
    task = episode.prompt.fields.get("task")
    return task if isinstance(task, int) else int(hashlib.sha256(episode.prompt.uid.encode()).hexdigest()[:7], 16)


class TextArena:
    """Plays games of textarena. One child process hosts all games of a rollout actor."""

    def __init__(
        self,
        game: str,
        options: Mapping[str, Any] | None = None,
        players: int = 1,
        opponent: str = POLICY,
        python: str | None = None,
        path: Sequence[str] = (),
        max_turns: int | None = None,
        turn_tokens: int | None = None,
    ) -> None:
        """Set the environment up. game: textarena's name of the game, such as `GuessTheNumber-v0`. options: arguments
        of the game. players: number of players. opponent: `policy`, or the import path of a function, possibly an
        `async def`, from the text that a player reads to its action. python: path of a Python interpreter with
        textarena; None uses the run's interpreter. path: folders that are put in front of its import path. max_turns:
        largest number of turns of the policy; an episode that reaches it is cut off. turn_tokens: largest number of
        tokens of a turn. Raises ValueError with a one-sentence message for values that do not fit.
        """
        if not isinstance(game, str) or not game:
            raise ValueError(f"environment.options.game: got {game!r}, expected the name of a game of textarena")
        checked_count("players", players)
        checked_count("max_turns", max_turns, none=True)
        checked_count("turn_tokens", turn_tokens, none=True)
        self._opponent = None if opponent == POLICY else import_object(opponent, "environment.options.opponent")
        self._players, self._max_turns, self._turn_tokens = players, max_turns, turn_tokens
        own, folders = checked_python(python), import_folders(path)
        if python is None:
            check_installed("textarena", "textarena", folders)
        first = {"game": game, "options": checked_section("options", options), "players": players}
        self._child = ReplacedChild(lambda: ChildProcess.start("textarena", SCRIPT, first, own, folders))
        self._sessions = itertools.count()

    async def play(self, episode: Episode) -> float:
        """Play one game, and return the reward of the policy's player. In a game of several players, the player follows
        from the seed."""
        seed = seed_of(episode)
        player = seed % self._players
        with episode.clock.stopped():  # The start has its own time limit and must not count against the episode.
            child = await self._child.get()
        session = f"{episode.name}/{next(self._sessions)}"
        others: dict[int, list[dict[str, str]]] = {}
        turns = 0
        try:
            seen = await _told(child, {"do": "reset", "session": session, "seed": seed})
            while not seen["done"]:
                if seen["player"] != player:
                    action = await self._answer_of_opponent(
                        episode, others.setdefault(seen["player"], []), seen["text"]
                    )
                elif turns == self._max_turns:
                    episode.finish_reason = "length"
                    return 0.0
                else:
                    said = [{"role": "user", "content": seen["text"]}]
                    action = (await episode.say(said, max_new_tokens=self._turn_tokens)).content
                    turns += 1
                seen = await _told(child, {"do": "step", "session": session, "action": action})
        finally:
            await _end(child, session)
        episode.finish_reason = "stop"  # The game has ended, even if the last turn was cut off at its limit.
        return dict(seen["rewards"]).get(player, 0.0)

    async def _answer_of_opponent(self, episode: Episode, messages: list[dict[str, str]], text: str) -> str:
        """Return the action of another player. messages: its conversation so far, which is continued."""
        if self._opponent is not None:
            try:
                answer: Any = self._opponent(text)
            except BaseException as error:
                raise contained(error) from None
            return str(await awaited(lambda: answer) if inspect.isawaitable(answer) else answer)
        chat = episode.services.chat()
        messages.append({"role": "user", "content": text})
        ids = chat.render(messages)
        room = self._turn_tokens or episode.params.max_new_tokens
        try:
            completion, _ = await episode.sample_turn(ids, room, stop_token_ids=chat.stop_token_ids)
        except OutOfTokens as error:
            raise RuntimeError(str(error)) from error
        action = chat.parse(completion.token_ids.tolist()).content
        messages.append({"role": "assistant", "content": action})
        return action

    async def close(self) -> None:
        """End the child process. Idempotent."""
        await self._child.close()


async def _end(child: ChildProcess, session: str) -> None:
    """Let the process forget a game. A game that hangs holds up all others, so then the process is replaced. A process
    that answers others meanwhile only has much to do, and forgets the game later."""
    before = child.num_answers
    try:
        async with asyncio.timeout(CLOSE_S):
            await child.call({"do": "close", "session": session})
    except SandboxFailed:
        pass
    except TimeoutError:
        if child.num_answers == before:
            child.kill()


async def _told(child: ChildProcess, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of the process that hosts the games. Raises RuntimeError with the error of the game."""
    answer = await child.call(message)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer
