"""An environment of NeMo-Gym's tasks: the tools and the verifier are those of a resources server, the loop is here.

    a row of the data set -> POST /seed_session
    answer with calls     -> POST /{tool} for each call -> its result, which the policy reads next
    last answer           -> POST /verify with the row and the whole response -> the reward

Written from the schema of nemo-gym 0.7.0 (its modules `base_resources_server` and `simple_agent`); not run against the
product, which needs Python 3.13.14.
"""

import json
import time
from pathlib import Path

import aiohttp

PARAMETERS = "responses_create_params"
"""Field of a row with the request that begins an episode."""


class NemoGym:
    """Plays the tasks of a NeMo-Gym data set by number, with the tools and the verifier of its resources server."""

    def __init__(self, server, data, max_turns=8, turn_tokens=None):
        """server: URL of the resources server. data: JSONL file of its tasks. max_turns, turn_tokens: largest number of
        turns of an episode, and of tokens of a turn."""
        if not server.startswith(("http://", "https://")):
            raise ValueError(f"environment.options.server: got {server!r}, expected a URL that begins with http")
        self._server, self._max_turns, self._turn_tokens = server.rstrip("/"), max_turns, turn_tokens
        self._rows = _rows(data)

    async def play(self, episode):
        """Play one task, and return the reward of the verifier. Raises RuntimeError if the server says that the sample
        must not count, and ConnectionError if it cannot be reached."""
        row = self._rows[episode.prompt.fields["task"] % len(self._rows)]
        try:
            # The server knows an episode by its cookie; the jar is one that takes cookies of addresses without a name.
            async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
                await self._posted(client, "seed_session", row)
                output = await self._loop(client, episode, row[PARAMETERS])
                said = json.loads(await self._posted(client, "verify", {**row, "response": _response(row, output)}))
        except aiohttp.ClientError as error:
            raise ConnectionError(f"the NeMo-Gym server at {self._server}: {type(error).__name__} {error}") from error
        if said.get("mask_sample"):
            raise RuntimeError(f"NeMo-Gym masked the sample: {said.get('failure_kind')} {said.get('failure_reason')}")
        for name, value in (said.get("reward_components") or {}).items():
            episode.reward(value, name)
        return said["reward"]

    async def _loop(self, client, episode, request):
        """Let the policy answer and call tools, and return the items of the response."""
        given = request["input"]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        if request.get("instructions"):
            messages.insert(0, {"role": "system", "content": request["instructions"]})
        tools = [_tool(tool) for tool in request.get("tools") or () if tool.get("type") == "function"]
        output = []
        for turn in range(self._max_turns):
            reply = await episode.say(messages, tools=tools, max_new_tokens=self._turn_tokens)
            output += _items(reply, f"{episode.name}.{turn}")
            if not reply.tool_calls:
                return output
            results = [await self._result(client, call) for call in reply.tool_calls]
            pairs = list(zip(reply.tool_calls, results, strict=True))
            output += [{"type": "function_call_output", "call_id": call.id, "output": text} for call, text in pairs]
            messages = [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in pairs]
        episode.finish_reason = "length"
        return output

    async def _result(self, client, call):
        """Return the text that a tool answers; NeMo-Gym lets a model read an error, too."""
        try:
            arguments = json.loads(call.arguments)
        except ValueError as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error}"})
        return await self._posted(client, call.name, arguments, tool=True)

    async def _posted(self, client, path, body, *, tool=False):
        async with client.post(f"{self._server}/{path}", json=body) as answer:
            text = await answer.text()
            if answer.status >= 400 and not tool:
                raise RuntimeError(f"NeMo-Gym answered /{path} with the status {answer.status}: {text[:500]}")
            return text


def _rows(data):
    try:
        lines = Path(data).expanduser().read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"environment.options.data: got {data!r}, which cannot be read: {error}") from error
    if not rows or not all(isinstance(row, dict) and "input" in (row.get(PARAMETERS) or ()) for row in rows):
        raise ValueError(
            f"environment.options.data: got {data!r}, expected rows with {PARAMETERS}.input, NeMo-Gym's format"
        )
    return rows


def _tool(tool):
    """Return a tool of the Responses API in the form of chat completions."""
    return {"type": "function", "function": {k: tool[k] for k in ("name", "description", "parameters") if k in tool}}


def _items(reply, name):
    """Return an answer as items of a response."""
    calls = [
        {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        for call in reply.tool_calls
    ]
    if not reply.content and calls:
        return calls
    content = [{"type": "output_text", "text": reply.content, "annotations": []}]
    message = {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": content}
    return [message, *calls]


def _response(row, output):
    request = row[PARAMETERS]
    return {
        "id": "resp_0",
        "object": "response",
        "created_at": time.time(),
        "model": request.get("model") or "policy",
        "output": output,
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "tool_choice": request.get("tool_choice", "auto"),
        "tools": request.get("tools") or [],
    }
