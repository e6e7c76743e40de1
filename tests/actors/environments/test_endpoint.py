"""The endpoint: exact tokens in rows, streams, tools, repeats, dropped clients, and what strangers send."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("renderers")

import openai

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.environments.config import EndpointConfig, EnvironmentConfig
from headrace.actors.environments.endpoint import server as endpoint_server
from headrace.actors.environments.endpoint import session as endpoint_session
from headrace.actors.environments.episode import Episode
from headrace.tests.actors.environments.endpoint_world import (
    CALL,
    END,
    TOKENIZER,
    TOOLS,
    Recorder,
    World,
    check_rows,
    played,
)


def client_of(episode: Episode, **settings: Any) -> openai.AsyncOpenAI:
    address = episode.endpoint
    return openai.AsyncOpenAI(base_url=address.url, api_key=address.secret, max_retries=0, **settings)


# ---------------------------------------------------------------- rows


async def use_tools(episode: Episode) -> float:
    async with client_of(episode) as client:
        messages: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "ab 1+2?"}]
        for turn in range(3):
            answer = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS, temperature=0.3)
            said = answer.choices[0].message
            if turn == 2:
                assert said.content == "it is 3" and answer.choices[0].finish_reason == "stop"
                return 1.0
            [call] = said.tool_calls or []
            assert call.type == "function" and json.loads(call.function.arguments) == {"a": 1, "b": 2}
            assert answer.choices[0].finish_reason == "tool_calls"
            shown = said.model_dump(exclude_none=True)
            shown["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": 2}'  # clients write it their own way
            messages += [shown, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    return 0.0


def test_a_conversation_with_tools_is_one_row_of_the_tokens_that_the_engine_saw() -> None:
    engine = Recorder(CALL, CALL, "it is 3", version=5)
    [sample] = played(use_tools, engine)
    assert not sample.error and sample.rewards == {"reward": 1.0} and len(sample.rows) == 1
    check_rows(sample, engine)


def test_each_call_is_a_row_of_its_own_where_that_is_wanted() -> None:
    engine = Recorder(CALL, CALL, "it is 3", version=5)
    endpoint = EndpointConfig(enabled=True, rows="call")
    [sample] = played(use_tools, engine, endpoint=endpoint, config=EnvironmentConfig(max_rows=3))
    assert not sample.error and len(sample.rows) == 3 and [turn.row for turn in sample.turns] == [0, 1, 2]
    check_rows(sample, engine)
    [sample] = played(use_tools, Recorder(CALL, CALL, "it is 3"), endpoint=endpoint)
    assert sample.error == "the episode has 3 rows, more than environment.max_rows=1" and len(sample.rows) == 1


def test_a_client_that_rewrites_its_history_begins_a_new_row() -> None:
    async def forget(episode: Episode) -> float:
        async with client_of(episode) as client:
            for text in ("one", "two"):
                messages: list[Any] = [{"role": "user", "content": text}]
                await client.chat.completions.create(model="m", messages=messages)
        return 0.25

    engine = Recorder("abab", version=5)
    [sample] = played(forget, engine, config=EnvironmentConfig(max_rows=2))
    assert not sample.error and len(sample.rows) == 2
    check_rows(sample, engine)


def test_streams_text_completions_models_and_logprobs() -> None:
    async def speak(episode: Episode) -> float:
        async with client_of(episode) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            text = ""
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            stream = await client.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            usage = None
            async for chunk in stream:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                usage = chunk.usage or usage
            assert text == "abc" and usage is not None and usage.completion_tokens == 4
            calls: list[Any] = []
            stream = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)
            async for chunk in stream:
                calls += chunk.choices[0].delta.tool_calls or []
            assert [call.function.name for call in calls] == ["add"]
            plain = await client.completions.create(model="m", prompt="once", logprobs=1, max_tokens=2)
            assert plain.choices[0].text == "ab" and plain.choices[0].finish_reason == "length"
            assert plain.choices[0].logprobs is not None and plain.choices[0].logprobs.token_logprobs == [-1.0, -1.0]
            more = await client.completions.create(model="m", prompt="onceab upon")
            assert more.choices[0].text == "xyz"
            raw = await client.chat.completions.with_raw_response.create(
                model="m", messages=messages, top_p=0.1, logprobs=True, extra_body={"return_token_ids": True}
            )
            body = json.loads(raw.content)
            assert raw.headers["x-headrace-ignored"] == "top_p"
            assert (
                body["choices"][0]["token_ids"] == engine.seen[-1][2] and body["prompt_token_ids"] == engine.seen[-1][1]
            )
            assert [token["logprob"] for token in body["choices"][0]["logprobs"]["content"]] == [-1.0] * 4
        return 1.0

    engine = Recorder("abc", CALL, "abc", "xyz", "abc", version=5)
    [sample] = played(speak, engine, config=EnvironmentConfig(max_rows=4))
    assert not sample.error, sample.error
    assert [turn.row for turn in sample.turns] == [0, 1, 2, 2, 3], "a text that goes on stays in its row"
    check_rows(sample, engine)


def test_requests_say_from_which_tokens_they_are_answered_where_they_may() -> None:
    async def speak(episode: Episode) -> float:
        async with client_of(episode) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            given: dict[str, Any] = {"model": "m", "messages": messages}
            raw = await client.chat.completions.with_raw_response.create(
                **given, top_p=0.5, temperature=1.0, presence_penalty=0.0, seed=3, extra_body={"top_k": 5, "min_p": 0.1}
            )
            assert raw.headers["x-headrace-ignored"] == "seed"
            await client.chat.completions.create(**given)
            refusals: list[tuple[dict[str, Any], str]] = [
                ({"temperature": 0.3}, "temperature: got 0.3, expected 1 or unset, because training repeats the run's"),
                ({"frequency_penalty": 0.5}, "frequency_penalty: got 0.5, expected 0 or unset"),
                ({"logit_bias": {"5": 1}}, "logit_bias: got {'5': 1}, expected {} or unset"),
                ({"extra_body": {"bad_words": ["a"]}}, "bad_words: got ['a'], expected [] or unset"),
                ({"extra_body": {"min_tokens": 3}}, "min_tokens: got 3, expected 0 or unset"),
                ({"top_p": 1.5}, "top_p: got 1.5, expected above 0, at most 1"),
                ({"extra_body": {"top_k": 2.5}}, "top_k: got 2.5, expected 0 (off) or more"),
                ({"extra_body": {"top_k": 10**30}}, "expected 0 (off) or more"),
                ({"extra_body": {"top_k": -1}}, "top_k: got -1, expected 0 (off) or more"),
                ({"extra_body": {"min_p": "0.1"}}, "min_p: got '0.1', expected from 0 to 1"),
            ]
            for more, sentence in refusals:
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.chat.completions.create(**given, **more)
                assert sentence in str(refused.value)
        return 1.0

    engine = Cutting("abc", "abc", version=5)
    endpoint = EndpointConfig(enabled=True, sampling="request")
    [sample] = played(speak, engine, config=EnvironmentConfig(max_rows=4), endpoint=endpoint, mask_limit=512)
    assert not sample.error, sample.error
    assert engine.cuts == [(0.5, 5, 0.1), (1.0, 0, 0.0)]


def test_an_evaluation_answers_requests_that_training_could_not_repeat() -> None:
    """An agent says the same in training and in validation, whose temperature is another one."""

    async def speak(episode: Episode) -> float:
        async with client_of(episode) as client:
            given: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            await client.chat.completions.create(**given, top_p=0.5, temperature=0.3, presence_penalty=1.0)
        return 1.0

    engine = Cutting("abc", version=5)
    [sample] = played(speak, engine, endpoint=EndpointConfig(enabled=True, sampling="request"))
    assert not sample.error and engine.cuts == [(0.5, 0, 0.0)], sample.error


class Cutting(Recorder):
    """A recorder that notes from which tokens each answer is to be drawn."""

    def __init__(self, *texts: str, **settings: Any) -> None:
        super().__init__(*texts, **settings)
        self.cuts = list[tuple[float, int, float]]()

    async def generate(self, request_id: str, prompt_ids: Any, params: SamplingParams) -> Any:
        self.cuts.append((params.top_p, params.top_k, params.min_p))
        return await super().generate(request_id, prompt_ids, params)


# ---------------------------------------------------------------- repeats, and clients that go away


def body_of(text: str, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode()


@pytest.mark.long
def test_a_client_that_went_away_is_not_recorded_and_a_repeat_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_session, "LINGER_S", 0.3)

    async def drop(episode: Episode) -> float:
        address = episode.endpoint
        url, headers = f"{address.url}/chat/completions", {"authorization": f"Bearer {address.secret}"}
        async with httpx.AsyncClient(headers=headers) as client:

            async def gives_up(text: str, **extra: str) -> None:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(url, content=body_of(text), timeout=0.1, headers=extra)

            await gives_up("kept")
            again = await client.post(url, content=body_of("kept"), headers={"x-stainless-retry-count": "1"})
            assert again.status_code == 200 and len(engine.seen) == 1, "the same answer, generated once"
            await gives_up("lost")
            await asyncio.sleep(0.6)
            key = {"idempotency-key": "k1"}
            both = await asyncio.gather(*(client.post(url, content=body_of("both"), headers=key) for _ in range(2)))
            assert both[0].json()["id"] == both[1].json()["id"]
            later = await client.post(url, content=body_of("both"), headers=key)
            assert later.json()["id"] == both[0].json()["id"]
            other = await client.post(url, content=body_of("other"), headers=key)
            assert other.status_code == 409 and other.json()["error"]["code"] == "key_in_use"
            twice = await asyncio.gather(*(client.post(url, content=body_of("twice")) for _ in range(2)))
            assert twice[0].json()["id"] != twice[1].json()["id"], "without a key, equal calls are two"
        return 1.0

    engine = Recorder("abab", version=5, latency_s=0.2)
    [sample] = played(drop, engine, config=EnvironmentConfig(max_rows=9))
    assert not sample.error, sample.error
    assert len(sample.turns) == 4, "kept, both, and twice"


def test_the_calls_of_an_episode_end_with_it() -> None:
    left: list[asyncio.Task[Any]] = []
    clients: list[openai.AsyncOpenAI] = []

    async def hurry(episode: Episode) -> float:
        client = client_of(episode)
        clients.append(client)
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model="m", messages=messages)
        left.append(asyncio.create_task(client.chat.completions.create(model="m", messages=messages)))
        await asyncio.sleep(0.05)
        return 1.0

    async def main() -> None:
        world = World(hurry, Recorder("ab", latency_s=0.2, version=5))
        [sample] = await world.run()
        assert len(sample.turns) == 1 and not sample.error
        with pytest.raises(openai.APIStatusError) as refused:
            await left[0]
        assert refused.value.status_code == 410
        await clients[0].close()
        await world.host.close()

    asyncio.run(main())


# ---------------------------------------------------------------- attacks


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "nested deeper than 100"),
        (b"[]", "a list, expected a JSON object"),
        (b"{}", "messages"),
        (b'{"model": "m", "messages": 1}', "messages"),
        (b'{"model": "m", "messages": []}', "at least one message"),
        (b'{"model": "m", "messages": [{}]}', "messages"),
        (b'{"model": "m", "messages": [null]}', "messages"),
        (b'{"model": "m", "messages": [{"role": "ghost", "content": "x"}]}', "messages"),
        (b'{"model":"m","messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}]}',
         "messages: got pictures while data.images.enabled=false, expected only texts"),
        (body_of("x", n=17), "n: got 17, expected at most rollout.endpoint.max_episode_calls=16"),
        (body_of("x", max_tokens=0), "max_tokens: got 0"),
        (body_of("x", max_tokens="many"), "max_tokens"),
        (body_of("x", response_format={"type": "json_object"}), "response_format"),
        (body_of("x" * 9000), "no tokens left"),
    ],
)  # fmt: skip
def test_a_malformed_request_is_refused_in_words(body: bytes, words: str) -> None:
    async def send(episode: Episode) -> float:
        address = episode.endpoint
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {address.secret}"}) as client:
            answer = await client.post(f"{address.url}/chat/completions", content=body)
            assert answer.status_code == 400, answer.text
            assert words in answer.json()["error"]["message"], answer.text
        return 1.0

    [sample] = played(send, Recorder("ab"))
    assert not sample.turns and (sample.rewards == {"reward": 1.0}), sample.error


async def attack_with_requests(url: str, secret: str) -> None:
    """Send requests without a session's secret, with another's, and malformed, endless and slow ones."""
    async with httpx.AsyncClient() as client:
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer " + "x" * 43},
                        {"authorization": f"Basic {secret}"},
                        {"authorization": f"Bearer {secret[:-1]}"}):  # fmt: skip
            for path in ("chat/completions", "completions"):
                assert (await client.post(f"{url}/{path}", content=body_of("x"), headers=headers)).status_code == 401
            assert (await client.get(f"{url}/models", headers=headers)).status_code == 401
        good = {"authorization": f"Bearer {secret}"}
        other = await client.post(
            f"{url}/chat/completions", content=body_of("x"), headers={**good, "x-headrace-episode": "p.1"}
        )
        assert other.status_code == 403
        assert (await client.get(f"{url}/episodes", headers=good)).status_code == 404
        assert (await client.get(f"{url}/chat/completions", headers=good)).status_code == 405
        large = await client.post(f"{url}/chat/completions", content=b"x" * (3 << 20), headers=good)
        assert large.status_code == 413 and "more than 1 MiB" in large.json()["error"]["message"]

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b"x" * (1 << 16)

        assert (await client.post(f"{url}/chat/completions", content=endless(), headers=good)).status_code == 413

        async def slow() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(3)

        with_bound = await client.post(f"{url}/chat/completions", content=slow(), headers=good)
        assert with_bound.status_code == 408


async def attack_with_bytes(port: int, secret: str) -> None:
    """Open connections that speak no HTTP, and one that breaks off in the middle of a request."""
    for garbage in (b"", b"\x16\x03\x01\x02", b"GET / HTTP/1.1\r\nhost:", b"POST /v1/chat/completions HTTP/1.1\r\n",
                    b"GET " + b"a" * 70_000):  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        async with asyncio.timeout(5):
            said = await reader.read()
        assert not said or b" 400 " in said.partition(b"\n")[0], said[:100]
        writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)  # and one that goes in the middle
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\n"
    writer.write(head.encode() + b"content-length: 500\r\n\r\n{")
    await writer.drain()
    writer.transport.abort()


@pytest.mark.long
def test_strangers_reach_nothing_and_nothing_of_others_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_server, "HEAD_S", 0.3)
    monkeypatch.setattr(endpoint_server, "DRAIN_S", 0.3)
    addresses: dict[int, Any] = {}
    done = asyncio.Event()

    async def honest(episode: Episode) -> float:
        addresses[episode.index] = episode.endpoint
        async with client_of(episode) as client:
            messages: list[Any] = [{"role": "user", "content": "start"}]
            first = await client.chat.completions.create(model="m", messages=messages)
            await done.wait()
            messages += [{"role": "assistant", "content": first.choices[0].message.content}]
            messages += [{"role": "user", "content": "end"}]
            await client.chat.completions.create(model="m", messages=messages)
        return 1.0

    async def attack() -> None:
        while len(addresses) < 2:
            await asyncio.sleep(0.01)
        url, secret = addresses[0].url, addresses[0].secret
        assert secret != addresses[1].secret and len(secret) >= 40
        await attack_with_requests(url, secret)
        await attack_with_bytes(int(url.rpartition(":")[2].partition("/")[0]), secret)

    async def main() -> None:
        endpoint = EndpointConfig(enabled=True, max_body_mib=1, body_timeout_s=0.5)
        engine = Recorder("abab", version=5)
        world = World(honest, engine, endpoint=endpoint)
        playing = asyncio.create_task(world.run(2))
        async with asyncio.timeout(60):
            await attack()
            done.set()
            samples = await playing
        assert all(not sample.error and len(sample.turns) == 2 and len(sample.rows) == 1 for sample in samples)
        assert len(engine.seen) == 4, "no stranger has made the engine work"
        assert not world.server._sessions
        await world.host.close()

    asyncio.run(main())


def test_an_episode_that_is_cancelled_while_the_server_starts_leaves_no_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listeners: list[socket.socket] = []
    listen = endpoint_server._listen

    def noted(host: str) -> socket.socket:
        listeners.append(listen(host))
        return listeners[-1]

    monkeypatch.setattr(endpoint_server, "_listen", noted)
    episode: Any = object()

    async def main() -> None:
        for reopened in (False, True):
            server = endpoint_server.EndpointServer(EndpointConfig(enabled=True))
            opening = asyncio.create_task(server.open(episode))
            await asyncio.sleep(0)
            assert len(listeners) == 1 + reopened
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            if reopened:  # the next episode waits for the same server
                assert str(listeners[-1].getsockname()[1]) in (await server.open(episode)).url
            await server.close()
            assert listeners[-1].fileno() == -1

    asyncio.run(main())
    assert len(listeners) == 2


def test_calls_beyond_the_limits_are_told_to_come_again() -> None:
    async def many(episode: Episode) -> float:
        async with client_of(episode) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            answers = await asyncio.gather(
                *(client.chat.completions.create(model="m", messages=messages) for _ in range(5)),
                return_exceptions=True,
            )
            refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
            assert len(refused) == 3 and refused[0].response.headers["retry-after"] == "1"
        return 1.0

    endpoint = EndpointConfig(enabled=True, max_episode_calls=2)
    engine = Recorder("ab", latency_s=0.2, version=5)
    [sample] = played(many, engine, endpoint=endpoint, config=EnvironmentConfig(max_rows=2))
    assert not sample.error and len(sample.turns) == 2, sample.error
    [sample] = played(
        many, Recorder("ab", latency_s=0.2), endpoint=EndpointConfig(enabled=True, max_calls=2),
        config=EnvironmentConfig(max_rows=2),
    )  # fmt: skip
    assert not sample.error, sample.error


def test_a_call_waits_while_the_weights_change() -> None:
    async def patient(episode: Episode) -> float:
        async with client_of(episode) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            await engine.pause("keep")
            call = asyncio.create_task(client.chat.completions.create(model="m", messages=messages))
            await asyncio.sleep(0.3)
            assert not call.done()
            await engine.resume()
            await call
        return 1.0

    engine = Recorder("ab", version=5)
    [sample] = played(patient, engine, config=EnvironmentConfig(turn_timeout_s=5.0))
    assert not sample.error, sample.error
    assert len(sample.turns) == 1


def test_the_log_probs_of_a_conversation_are_those_of_the_model(tmp_path: Path) -> None:
    """One pass of a real model over a row of three calls over the endpoint gives the engine's log-probs. What is
    trained on is what was sampled."""
    config = Qwen3Config(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, eos_token_id=END,
        pad_token_id=END, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)

    async def talk(episode: Episode) -> float:
        async with client_of(episode) as client:
            messages: list[Any] = [{"role": "user", "content": "one?"}]
            for _ in range(3):
                answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=12)
                said = answer.choices[0].message.model_dump(exclude_none=True)
                messages += [said, {"role": "user", "content": "more?"}]
        return 1.0

    async def main() -> Any:
        engine = HfEngine(str(tmp_path), seed=1)
        world = World(talk, engine)
        try:
            return await world.run(2)
        finally:
            await world.host.close()
            await engine.close()

    model = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for sample in asyncio.run(main()):
        assert not sample.error and len(sample.rows) == 1 and len(sample.turns) == 3, sample.error
        ids = torch.from_numpy(sample.input_ids).long()[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
        own = logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()
        chosen = sample.response_mask[1:] == 1
        assert np.abs(own[chosen] - sample.logprobs[1:][chosen]).max() < 1e-3


@pytest.mark.processes
def test_httpx_is_loaded_before_agents_can_run() -> None:
    """Agents' threads would otherwise meet it half loaded, as openai 3 looks for it among the loaded modules."""
    code = f"import sys; import {endpoint_server.__name__}; print(sys.modules['httpx'].Timeout(1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Timeout" in done.stdout, done.stderr


def test_a_policy_that_is_an_adapter_is_one_of_two_models() -> None:
    """The other is its base, whose answers are no turns of the episode."""

    async def chooses(episode: Episode) -> float:
        async with client_of(episode) as client:
            assert [model.id async for model in client.models.list()] == ["base", "policy"]
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            answers = [
                (await client.chat.completions.create(model=name, messages=messages)).choices[0].message.content
                for name in ("base", "policy", "base")
            ]
            assert answers == ["one", "two", "three"]
            with pytest.raises(openai.NotFoundError, match="model: got 'gpt', expected 'base' or 'policy'"):
                await client.chat.completions.create(model="gpt", messages=messages)
        return 1.0

    class Noting(Recorder):
        asked: list[str] = []

        async def generate(self, request_id: str, prompt_ids: Any, params: SamplingParams) -> Any:
            self.asked.append(params.adapter)
            return await super().generate(request_id, prompt_ids, params)

    engine = Noting("one", "two", "three")
    [sample] = played(chooses, engine, adapters=True)
    assert not sample.error and [turn.text for turn in sample.turns] == ["two"] and len(sample.rows) == 1
    assert engine.asked == ["base", "", "base"]


def test_a_prompt_that_is_too_long_for_the_base_does_not_end_the_policys_turns() -> None:
    async def judges(episode: Episode) -> float:
        async with client_of(episode) as client:
            with pytest.raises(openai.BadRequestError, match="the model 'base' has no tokens left"):
                await client.completions.create(model="base", prompt="a" * 5000)
        raise ValueError("the judge has failed")

    [sample] = played(judges, Recorder(), adapters=True)
    assert "the judge has failed" in sample.error and sample.finish_reason != "length"
