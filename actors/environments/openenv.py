"""The `openenv` environment plays episodes of an OpenEnv environment over the WebSocket protocol of its server.

    reset, action -> {"type": "step", "data": {...}} -> server: one session for each connection
    observation, reward, done <- {"type": "observation", "data": {...}} <-

The server is a running one, or an application that the rollout actor serves in separate processes. As a server takes
one session at a time unless its author allowed more, the actor starts as many servers as its episodes need.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..failures import SandboxFailed
from .child_process import ChildProcess, ReplacedChild, checked_python, checked_section, import_folders
from .episode import Episode
from .games import CLOSE_S, SCRIPT, checked_count, seed_of

TEXT = "{text}"
"""Placeholder of the policy's text in `options.action`."""
TEXT_FIELDS = ("text", "prompt", "message", "content", "output")
"""Fields of an observation of which the first is what the policy reads, if `options.observation` is unset."""
_OUTSIDE = ("done", "reward", "metadata")


class OpenEnv:
    """Plays episodes of an OpenEnv environment."""

    def __init__(
        self,
        server: str | None = None,
        app: str | None = None,
        python: str | None = None,
        path: Sequence[str] = (),
        observation: str | None = None,
        action: str | Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        turn_tokens: int | None = None,
        sessions: int = 1,
        max_servers: int = 8,
    ) -> None:
        """Set the environment up. server: URL of a running server. app: import path of an application,
        `package.server.app:app`, that is served instead. python: path of a Python interpreter that has it; None uses
        the run's interpreter. path: folders that are put in front of its import path. observation: field of an
        observation that the policy reads; None takes the first of TEXT_FIELDS that is text, or else the whole
        observation as JSON. action: field of an action that gets the policy's text, or a whole action with the
        placeholder `{text}`; None takes the only field that an action must have. reset: further arguments of a reset.
        max_turns: number of turns after which an episode ends. turn_tokens: largest number of tokens of a turn.
        sessions: number of sessions that a server takes at the same time. max_servers: largest number of servers that a
        rollout actor starts. Raises ValueError with a one-sentence message for values that do not fit.
        """
        if (server is None) == (app is None):
            raise ValueError(
                f"environment.options: got server={server!r} and app={app!r}, expected the URL of a server or the "
                "import path of an application"
            )
        if server is not None and not str(server).startswith(("http://", "https://")):
            raise ValueError(f"environment.options.server: got {server!r}, expected a URL that begins with http")
        if app is not None and not (isinstance(app, str) and re.fullmatch(r"[\w.]+:\w+", app)):
            raise ValueError(f"environment.options.app: got {app!r}, expected a path like package.server.app:app")
        if observation is not None and not isinstance(observation, str):
            raise ValueError(f"environment.options.observation: got {observation!r}, expected the name of a field")
        if action is not None and not isinstance(action, str | Mapping):
            raise ValueError(
                f"environment.options.action: got {action!r}, expected the name of a field, or a section with {TEXT!r}"
            )
        for name, number in (("sessions", sessions), ("max_servers", max_servers)):
            checked_count(name, number)
        for name, number in (("max_turns", max_turns), ("turn_tokens", turn_tokens)):
            checked_count(name, number, none=True)
        self._observation, self._action, self._reset = observation, action, checked_section("reset", reset)
        self._max_turns, self._turn_tokens = max_turns, turn_tokens
        own, folders, first = checked_python(python), import_folders(path), {"app": app}

        async def start() -> ChildProcess:
            return await ChildProcess.start("OpenEnv", SCRIPT, first, own, folders)

        servers = [server] if server else [ReplacedChild(start) for _ in range(max_servers)]
        self._servers = _Servers(servers, sessions)
        self._client: Any = None

    async def play(self, episode: Episode) -> float:
        """Play one episode, and return the sum of the rewards. An action that the server does not take is answered with
        what is wrong with it."""
        async with self._servers.place(episode) as server, self._connected(*server) as socket:
            data = await _told(socket, "reset", {"seed": seed_of(episode), "episode_id": episode.name, **self._reset})
            total, turns, template = 0.0, 0, await self._template(server[0])
            if server[1] is not None:
                server[1].answered = True
            episode.finish_reason = "stop"  # An episode is whole even if its last turn was cut off at turn_tokens.
            while not data.get("done") and turns != self._max_turns:
                said = [{"role": "user", "content": self._text(data)}]
                text = (await episode.say(said, max_new_tokens=self._turn_tokens)).content
                turns += 1
                data = await _told(socket, "step", _filled(template, text))
                total += float(data.get("reward") or 0.0)
                episode.reward(total)
        return total

    async def close(self) -> None:
        """End the servers that were started. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        await self._servers.close()

    @asynccontextmanager
    async def _connected(self, url: str, child: ChildProcess | None) -> AsyncIterator[Any]:
        """Context manager of a session. Raises SandboxFailed if the server is gone, or goes; a process of the actor
        is then given time to be seen as ended. A server that does not end the session would have no place for the next,
        so it is replaced."""
        import aiohttp  # The checks of a configuration do without it.

        if self._client is None:
            self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            async with self._client.ws_connect(f"{url.rstrip('/')}/ws", max_msg_size=0) as socket:
                try:
                    yield socket
                finally:
                    # The server takes the next session once it has ended this one, and then closes the connection.
                    if not socket.closed and not await _ended(socket) and child is not None:
                        child.kill()
        except (aiohttp.ClientError, OSError) as error:
            words = f"{type(error).__name__} {error}"
            if child is not None and await child.ended(CLOSE_S):
                words = await child.last_words()
            raise SandboxFailed(f"the OpenEnv server at {url} is gone: {words}") from error

    async def _template(self, url: str) -> Any:
        """Return an action with placeholders for the policy's text."""
        if isinstance(self._action, str):
            return {self._action: TEXT}
        if self._action is None:
            async with self._client.get(f"{url.rstrip('/')}/schema") as answer:
                schema = (await answer.json())["action"]
            needed = [name for name in schema.get("required", ()) if name != "metadata"]
            if len(needed) != 1:
                raise ValueError(
                    f"environment.options.action: got None, but an action needs the fields {needed}, expected the name "
                    f"of a field or an action with {TEXT}"
                )
            self._action = {needed[0]: TEXT}
        return self._action

    def _text(self, data: Mapping[str, Any]) -> str:
        """Return what the policy reads of an observation."""
        if "problem" in data:
            return data["problem"]
        found = data.get("observation") or {}
        if self._observation is not None:
            if self._observation not in found:
                raise ValueError(
                    f"environment.options.observation: got {self._observation!r}, expected one of {sorted(found)}"
                )
            value = found[self._observation]
            return value if isinstance(value, str) else json.dumps(value)
        text = next((found[name] for name in TEXT_FIELDS if isinstance(found.get(name), str)), None)
        return text or json.dumps({name: value for name, value in found.items() if name not in _OUTSIDE})


class _Servers:
    """The servers of a rollout actor, and the places for sessions that they have."""

    def __init__(self, servers: Sequence[str | ReplacedChild], sessions: int) -> None:
        self._free = {index: sessions for index in range(len(servers))}
        self._servers = servers
        self._places = asyncio.Semaphore(len(servers) * sessions)

    @asynccontextmanager
    async def place(self, episode: Episode) -> AsyncIterator[tuple[str, ChildProcess | None]]:
        """Context manager of a place on a server, for which it waits: the URL, and the process that was started."""
        with episode.clock.stopped():  # To wait for a place or for the start of a server is not the environment's time.
            await self._places.acquire()
            index = next(index for index, free in self._free.items() if free)  # Started servers come first.
            self._free[index] -= 1
            try:
                server = self._servers[index]
                child = None if isinstance(server, str) else await server.get()
                url = str(server) if child is None else child.said["url"]
            except BaseException:
                self._leave(index)
                raise
        try:
            yield url, child
        finally:
            self._leave(index)

    def _leave(self, index: int) -> None:
        self._free[index] += 1
        self._places.release()

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers if isinstance(server, ReplacedChild)))


async def _ended(socket: Any) -> bool:
    """End the session, and return whether the server has done so in time."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await socket.send_json({"type": "close"})
            while isinstance((await socket.receive()).data, str):  # The answer to a cancelled step may come first.
                pass
        return True
    except (OSError, TimeoutError):
        return False


async def _told(socket: Any, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the server says to a message; a `problem` is what is wrong with an action. Raises ConnectionError
    if the server closes the connection, and RuntimeError with an error of the environment or if it takes no session."""
    await socket.send_json({"type": kind, "data": data})
    message = await socket.receive()
    if not isinstance(message.data, str):
        raise ConnectionError("it has closed the connection")
    answer = json.loads(message.data)
    if answer.get("type") != "error":
        return answer["data"]
    error = answer["data"]
    if error.get("code") == "VALIDATION_ERROR" and kind == "step":
        wrong = [f"{'.'.join(map(str, part.get('loc', ())))}: {part.get('msg')}" for part in error.get("errors", ())]
        return {"problem": f"error: {'; '.join(wrong) or error.get('message')}"}
    if error.get("code") == "CAPACITY_REACHED":
        raise RuntimeError(f"environment.options.sessions: the server takes fewer sessions: {error.get('message')}")
    raise RuntimeError(f"the OpenEnv environment raised {error.get('code')}: {error.get('message')}")


def _filled(template: Any, text: str) -> Any:
    """Return an action with the policy's text in place of the placeholder."""
    if isinstance(template, Mapping):
        return {name: _filled(value, text) for name, value in template.items()}
    if isinstance(template, list):
        return [_filled(value, text) for value in template]
    return text if template == TEXT else template
