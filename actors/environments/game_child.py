"""Hosts games of textarena, or serves an application of OpenEnv, in a process whose Python does not need Headrace.

It reads one JSON object per line from its standard input and writes one per line to its standard output:
    in   {"game": "Wordle-v0", "options": {...}, "players": 1} or {"app": "my_env.server.app:app"}, first
    out  {"ready": true}, {"ready": true, "url": "http://127.0.0.1:40123"} or {"failed": "..."}
    in   {"id": 7, "do": "reset", "session": "p.0", "seed": 3}      begins a game
    in   {"id": 8, "do": "step", "session": "p.0", "action": "[5]"}
    out  {"id": 8, "player": 0, "text": "The target number is lower.", "done": false, "rewards": null}
    in   {"id": 9, "do": "close", "session": "p.0"}
    out  {"id": 9}
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

# This script runs without the package, so it reads the file of the package as a script.
_ERRORS = Path(__file__).parents[1] / "process" / "user_errors.py"
text_of_error = runpy.run_path(str(_ERRORS))["text_of_error"]


class RandomState:
    """The state of Python's and NumPy's global generators, which the games draw from. Each game has its own, so that
    its course does not depend on the games beside it."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        if numbers := sys.modules.get("numpy"):
            numbers.random.seed(seed)
        self.save()

    def save(self) -> None:
        numbers = sys.modules.get("numpy")
        self._state = random.getstate(), numbers.random.get_state() if numbers else None

    def restore(self) -> None:
        random.setstate(self._state[0])
        if self._state[1] is not None:
            sys.modules["numpy"].random.set_state(self._state[1])


class Game:
    """A game in progress. A player reads only what is new to it, because its row has what it read and said before."""

    def __init__(self, library: Any, first: dict[str, Any], seed: int) -> None:
        self._own_action = library.ObservationType.PLAYER_ACTION
        game, actions = library.make(first["game"], **first["options"]), []
        while isinstance(game, library.Wrapper):  # Wrappers of observations repeat the whole history.
            if isinstance(game, library.ActionWrapper):
                actions.append(type(game))
            game = game.env
        for wrapper in reversed(actions):
            game = wrapper(game)
        self._game = game
        self._random = RandomState(seed)
        game.reset(num_players=first["players"], seed=seed)
        self._random.save()

    def step(self, action: str) -> dict[str, Any]:
        self._random.restore()
        done, _ = self._game.step(action)
        self._random.save()
        return self.seen(bool(done))

    def seen(self, done: bool = False) -> dict[str, Any]:
        """Return what the player whose turn it is reads, or the rewards of a game that has ended."""
        if done:
            rewards, _ = self._game.close()
            pairs = [[int(player), float(reward)] for player, reward in (rewards or {}).items()]
            return {"player": 0, "text": "", "done": True, "rewards": pairs}
        player, messages = self._game.get_observation()
        lines = [self._line(*message) for message in messages if message[0] != player or message[2] != self._own_action]
        return {"player": int(player), "text": "\n".join(lines), "done": False, "rewards": None}

    def _line(self, sender: int, text: str, _: Any) -> str:
        return text if sender < 0 else f"[{self._game.state.role_mapping.get(sender, f'Player {sender}')}] {text}"


class Games:
    """All games that the process hosts, by session."""

    def __init__(self, first: dict[str, Any]) -> None:
        self._library: Any = importlib.import_module("textarena")
        self._first = first
        self._games: dict[str, Game] = {}
        Game(self._library, first, 0)  # It raises now what every episode would raise.

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        session = message["session"]
        if message["do"] == "reset":
            game = self._games[session] = Game(self._library, self._first, message["seed"])
            return game.seen()
        if message["do"] == "step":
            return self._games[session].step(message["action"])
        self._games.pop(session, None)
        return {}


def host(first: dict[str, Any], write: Any) -> None:
    """Play games until the input ends."""
    games = Games(first)
    write({"ready": True})
    for line in sys.stdin:
        message = json.loads(line)
        if "cancel" in message:  # A call is answered before the next is read.
            continue
        try:
            answer = games.answer(message)
        except Exception as error:
            answer = {"error": text_of_error(error)}
        write({"id": message["id"], **answer})


async def serve(first: dict[str, Any], write: Any) -> None:
    """Serve an application on a free port until the input ends."""
    uvicorn: Any = importlib.import_module("uvicorn")
    module, _, name = first["app"].partition(":")
    app = getattr(importlib.import_module(module), name or "app")
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if serving.done():
        serving.result()
        raise RuntimeError("the application did not start")
    write({"ready": True, "url": f"http://127.0.0.1:{listening.getsockname()[1]}"})
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # The caller closes the connections first; an application may wait for more.


def main() -> None:
    # Output of the libraries must not mix with the protocol's lines, so it goes to standard error.
    output = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def write(message: dict[str, Any]) -> None:
        output.write(json.dumps(message) + "\n")

    first = json.loads(sys.stdin.readline())
    try:
        asyncio.run(serve(first, write)) if "app" in first else host(first, write)
    except Exception as error:
        write({"failed": text_of_error(error)})


if __name__ == "__main__":
    main()
