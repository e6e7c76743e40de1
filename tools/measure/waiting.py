"""`python tools/measure/waiting.py` measures what episodes cost that wait for their tools, in one rollout actor.

Each episode takes a turn of the policy, then waits for its tool, and so on. `plain` plays them in coroutines of an
environment; `endpoint` lets each call the policy over HTTP, as an agent does. The engine answers at once, so all time
is that of the host of the episodes. The columns:

    bytes       resident memory of the process per waiting episode, its tokens and its environment included
    cpu         share of a core that the process takes while all episodes wait
    latency     milliseconds from a tool's answer to the policy's next request, with `--rate` answers a second (for
                `endpoint` it includes the client's part, which runs in the same process)
    overtaken   largest number of requests that were answered in the meantime, though their tools answered later
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import random
import resource
import time
from collections.abc import Sequence

import numpy as np
import psutil
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.actors.environments.config import EndpointConfig, EnvironmentConfig
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.factory import build_endpoint
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.protocols import Prompt
from headrace.bench.records import conditions, one_line

WORDS = 1000
PROMPT, ANSWER = 256, 64
"""Number of tokens of a prompt and of each turn."""


class Answers:
    """An engine that answers at once, and notes how long after its tool each episode asks."""

    version = 0
    died = ""

    def __init__(self) -> None:
        self.told: dict[str, tuple[float, int]] = {}
        """For each episode whose tool has answered: the time, and the number of tools that had answered before."""
        self.latencies: list[float] = []
        self.order: list[int] = []
        """Numbers of the tools' answers, in the order in which their episodes asked."""
        self._answer = np.arange(ANSWER, dtype=np.int32), np.full(ANSWER, -1.0, np.float32), np.zeros(ANSWER, np.int32)

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        told = self.told.pop(request_id.partition("/")[0], None)
        if told is not None:
            self.latencies.append(time.perf_counter() - told[0])
            self.order.append(told[1])
        ids, logprobs, versions = self._answer
        return [Completion(ids.copy(), logprobs.copy(), "stop", versions.copy())]

    async def abort(self, request_id: str) -> None: ...


class Tools:
    """Environment whose tools answer when they are told to."""

    def __init__(self, engine: Answers, over_http: bool, turns: int) -> None:
        """over_http: whether the policy is called through the endpoint. turns: number of turns of the policy before the
        first wait."""
        self.waiting: dict[str, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()
        self._num_told = 0
        self._ended = False
        self._engine = engine
        self._over_http = over_http
        self._turns = turns

    async def play(self, episode: Episode) -> float:
        text, turn = episode.prompt.text, 0
        while not self._ended:
            if self._over_http:
                text += await ask(episode, text) + " w1"
            else:
                await episode.generate(max_new_tokens=ANSWER)
            turn += 1
            if turn >= self._turns and not self._ended:
                tool = self.waiting[episode.name] = asyncio.get_running_loop().create_future()
                self._changed.set()
                await tool
        return 0.0

    async def until(self, number: int) -> None:
        """Wait until so many episodes wait for their tools."""
        while len(self.waiting) < number:
            self._changed.clear()
            await self._changed.wait()

    def answer(self, name: str) -> None:
        """Let the tool of an episode answer now."""
        self._engine.told[name] = (time.perf_counter(), self._num_told)
        self._num_told += 1
        self.waiting.pop(name).set_result(None)

    def end(self) -> None:
        """Let all tools answer, and end the episodes."""
        self._ended = True
        for name in list(self.waiting):
            self.answer(name)


async def ask(episode: Episode, text: str) -> str:
    """Send a request as an agent does that opens a connection for each call, and return the answer's text."""
    address = episode.endpoint
    host, _, port = address.url.removeprefix("http://").removesuffix("/v1").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        body = json.dumps({"model": address.model, "prompt": text, "max_tokens": ANSWER}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {address.secret}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        answer = await reader.read()
    finally:
        writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]


def endpoint_config(kind: str, calls: int) -> EndpointConfig:
    return EndpointConfig(enabled=kind == "endpoint", max_calls=calls)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(WORDS)} | {"</s>": WORDS}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def resident() -> int:
    """Return the resident bytes of this process, without what is garbage."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


async def measure(kind: str, asked: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one kind of episodes."""
    engine = Answers()
    tools = Tools(engine, kind == "endpoint", asked.turns)
    config = EnvironmentConfig(max_episodes=asked.episodes, turn_timeout_s=3600, episode_timeout_s=36000)
    endpoint = build_endpoint(endpoint_config(kind, asked.episodes))
    host, tokenizer, rng = EpisodeHost(tools, config, endpoint=endpoint), make_tokenizer(), random.Random(0)
    before = resident()
    params = SamplingParams(n=asked.group, max_new_tokens=1 << 20)
    groups = []
    for uid in range(asked.episodes // asked.group):
        text = " ".join(f"w{rng.randrange(WORDS)}" for _ in range(PROMPT))
        prompt = Prompt(str(uid), text, "", {})
        groups.append(asyncio.create_task(host.run(prompt, engine, tokenizer, params)))
        if kind == "endpoint":
            await asyncio.sleep(0.05)  # All at once would need more connections than a process may have.
    await tools.until(asked.episodes)
    await asyncio.sleep(1.0)
    found = {"bytes": (resident() - before) / asked.episodes}
    cpu, clock = time.process_time(), time.perf_counter()
    await asyncio.sleep(asked.seconds)
    found["cpu"] = (time.process_time() - cpu) / (time.perf_counter() - clock)
    until = time.perf_counter() + asked.seconds
    due = 0.0
    while time.perf_counter() < until:
        due += asked.rate * 0.01
        names = rng.sample(list(tools.waiting), min(int(due), len(tools.waiting)))
        due -= len(names)
        for name in names:
            tools.answer(name)
        await asyncio.sleep(0.01)
    late = np.array(engine.latencies) * 1e3
    found |= {"p50_ms": float(np.median(late)), "p99_ms": float(np.quantile(late, 0.99)), "max_ms": float(late.max())}
    order = np.array(engine.order)
    found["overtaken"] = float(max(0, int((np.arange(len(order)) - order).max())))
    found["answers"] = float(len(late))
    tools.end()
    await asyncio.gather(*groups)
    await host.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000, help="number of episodes that wait")
    parser.add_argument("--group", type=int, default=8, help="number of episodes of a prompt")
    parser.add_argument("--turns", type=int, default=1, help="number of turns that each has taken before")
    parser.add_argument("--rate", type=float, default=300.0, help="number of tools that answer per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--kinds", nargs="+", default=["plain", "endpoint"], choices=["plain", "endpoint"])
    asked = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for kind in asked.kinds:
        found = asyncio.run(measure(kind, asked))
        print(kind, {name: round(value, 4) for name, value in found.items()}, flush=True)
    print(one_line(conditions(**vars(asked), files=files)))


if __name__ == "__main__":
    main()
