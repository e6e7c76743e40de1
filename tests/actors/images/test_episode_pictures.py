"""Pictures in conversations: those of the prompt, those that an environment shows, and those of agents' requests."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.actors.engines.chat import build_chat_format
from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.environments.config import EndpointConfig, EnvironmentConfig
from headrace.actors.environments.endpoint.chat_completions import CHAT
from headrace.actors.environments.endpoint.dialects import Dialect
from headrace.actors.environments.endpoint.messages import MESSAGES
from headrace.actors.environments.endpoint.responses import RESPONSES
from headrace.actors.environments.endpoint.server import EndpointServer
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.images.config import ImagesConfig
from headrace.actors.images.preparation import PicturePool
from headrace.actors.images.processor import Processed
from headrace.actors.images.prompt_pictures import BadPicture, Picture
from headrace.actors.protocols import Prompt, Sample, Score
from headrace.actors.rollout.pictures.picture_rows import RowPictures
from headrace.tests.actors.images.tiny_vision import PAD, draw, encoded

ASK = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "count squares"}]},)
TEXT = f"<user> <|vision_start|>{PAD}<|vision_end|>count squares <assistant>"


class Inside(PicturePool):
    """A pool that works in this process, because a process of its own takes seconds to start."""

    async def _run(self, data: bytes) -> Processed:
        return self.processor.process(data)


class Watched(ScriptedEngine):
    """An engine that keeps what it was asked."""

    def __init__(self, said: Sequence[int]) -> None:
        super().__init__(lambda request_id, prompt_ids, sample: said)
        self.asked: list[tuple[list[int], list[str]]] = []
        self.own_places: list[tuple[int, ...]] = []

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        self.asked.append((list(prompt_ids), [picture.name for picture in params.pictures]))
        self.own_places.append(params.own_places)
        return await super().generate(request_id, prompt_ids, params)


def play(
    environment: Any,
    folder: str,
    tokenizer: Any,
    *,
    images: bool = True,
    endpoint: Any = None,
    said: Sequence[int] = (6, 7),
) -> tuple[Sample, Watched, RowPictures]:
    """Play an episode of a prompt with one picture."""
    pool = Inside(ImagesConfig(enabled=True), folder, folder, tokenizer)
    pictures = RowPictures(pool, tokenizer, 64)
    chat, engine = build_chat_format(tokenizer, "template", {}, {}), Watched(said)
    config = EnvironmentConfig(max_rows=2)
    host = EpisodeHost(
        environment,
        config,
        chat=lambda: chat,
        max_prompt_tokens=64,
        endpoint=endpoint,
        pictures=pool if images else None,
    )

    async def run() -> Sample:
        shown = (Picture("picture", encoded(draw(100, 60))),)
        prompt = await pictures.prepared(Prompt("a", TEXT, "1", {}, ASK, shown))
        [sample] = await host.run(prompt, engine, tokenizer, SamplingParams(max_new_tokens=64))
        await host.close()
        await pool.close()
        return sample

    return asyncio.run(run()), engine, pictures


def test_an_environment_shows_pictures(vision_folder: str, vision_tokenizer: Any) -> None:
    async def screenshots(episode: Episode) -> float:
        await episode.say(episode.prompt.messages)
        seen = {"type": "image", "image": draw(57, 200, seed=1)}
        await episode.say([{"role": "user", "content": [seen, {"type": "text", "text": "a"}]}])
        await episode.say([{"role": "user", "content": "b"}])
        branch = episode.branch(episode.turns[1])
        await branch.say([])
        with pytest.raises(BadPicture, match="tokens end within picture 1, expected all of its tokens"):
            episode.branch(episode.turns[1].start - 4)
        return 1.0

    sample, engine, pictures = play(screenshots, vision_folder, vision_tokenizer)
    assert sample.rewards == {"reward": 1.0} and not sample.error
    assert [one.num_tokens for one in sample.pictures] == [8, 14]
    assert [[one.num_tokens for one in row.pictures] for row in sample.more_rows] == [[8, 14]]
    pad = pictures.pool.processor.token_ids[0]
    names = [one.blob.name for one in sample.pictures]
    assert [shown for _, shown in engine.asked] == [names[:1], names, names, names]
    assert [ids.count(pad) for ids, _ in engine.asked] == [8, 22, 22, 22]
    [checked], _ = pictures.checked([sample], [Score(1.0, {}, True)])
    assert checked is sample, "the rows have a token for each feature"
    # The first request has the tokens that a prompt of the data set has.
    assert engine.asked[0][0] == vision_tokenizer(sample.prompt.text, add_special_tokens=False)["input_ids"]


def test_engines_learn_which_placeholders_the_policy_sampled(vision_folder: str, vision_tokenizer: Any) -> None:
    async def screenshots(episode: Episode) -> float:
        seen = {"type": "image", "image": draw(57, 200, seed=1)}
        await episode.say(episode.prompt.messages)
        await episode.say([{"role": "user", "content": [seen]}])
        await episode.say([{"role": "user", "content": "b"}])
        return 1.0

    pad = vision_tokenizer.convert_tokens_to_ids(PAD)
    sample, engine, pictures = play(screenshots, vision_folder, vision_tokenizer, said=[6, pad])
    assert not sample.error, sample.error
    own = np.flatnonzero((sample.input_ids == pad) & (sample.response_mask == 1))
    assert engine.own_places == [(), (own[0],), (own[0], own[1])] and len(own) == 3
    [checked], _ = pictures.checked([sample], [Score(1.0, {}, True)])
    assert checked is sample, "the row is trained on"


def test_pictures_that_cannot_be_shown_fail_the_episode(vision_folder: str, vision_tokenizer: Any) -> None:
    def saying(*parts: Any) -> Any:
        async def play(episode: Episode) -> None:
            await episode.say([{"role": "user", "content": list(parts)}])

        return play

    image = {"type": "image"}
    for parts, expected in (
        ([image, image], "the messages have 2 parts of type image without a picture, but the prompt has 1 picture,"),
        ([{**image, "image": "/etc/hostname"}], "picture 0: got '/etc/hostname', expected bytes, a PIL image, an a"),
        ([{**image, "image": "http://x"}], "picture 0: got the URL 'http://x', expected none"),
        ([{"type": "video"}], "got a part of type 'video', expected text and pictures"),
        ([{"type": "text", "text": PAD}, {**image, "image": draw(50, 50)}], "the text has 2 placeholders"),
    ):
        sample, _, _ = play(saying(*parts), vision_folder, vision_tokenizer)
        assert expected in sample.error, sample.error
    sample, _, _ = play(saying({**image, "image": draw(50, 50)}), vision_folder, vision_tokenizer, images=False)
    assert "got messages with pictures while data.images.enabled=false, expected only text" in sample.error
    assert np.array_equal(sample.input_ids, vision_tokenizer(sample.prompt.text)["input_ids"])


URI = "data:image/png;base64," + base64.b64encode(encoded(draw(57, 200, seed=1))).decode()

SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URI.partition(",")[2]}}


def test_agents_show_pictures_through_the_endpoint(vision_folder: str, vision_tokenizer: Any) -> None:
    async def agent(episode: Episode) -> float:
        address, seen = episode.endpoint, [{"type": "image_url", "image_url": {"url": URI}}]
        messages: list[Any] = [{"role": "user", "content": [*seen, {"type": "text", "text": "a"}]}]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {address.secret}"}) as client:
            for more in ([*seen, *seen], "b", [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]):
                answer = await client.post(f"{address.url}/chat/completions", json={"model": "m", "messages": messages})
                assert answer.status_code == 200, answer.text
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": more}]
            answer = await client.post(f"{address.url}/chat/completions", json={"model": "m", "messages": messages})
            assert answer.status_code == 400 and "picture 0: got 'file:///etc/hostname', expected bytes" in answer.text
        return 1.0

    endpoint = EndpointServer(EndpointConfig(enabled=True))
    sample, engine, pictures = play(agent, vision_folder, vision_tokenizer, endpoint=endpoint)
    assert sample.rewards == {"reward": 1.0} and not sample.error and not sample.more_rows, sample.error
    assert [one.num_tokens for one in sample.pictures] == [14] * 3
    assert [len(shown) for _, shown in engine.asked] == [1, 3, 3]
    [checked], _ = pictures.checked([sample], [Score(1.0, {}, True)])
    assert checked is sample and pictures.pool.counts.processed == 2, "a picture is preprocessed once"


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URI}}]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URI}]}]}),
        (
            RESPONSES,
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_image", "image_url": URI}],
                    }
                ]
            },
        ),
        (MESSAGES, {"messages": [{"role": "user", "content": [SOURCE]}]}),
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [SOURCE]}]}
                ]
            },
        ),
    ],
)
def test_pictures_in_all_dialects(dialect: Dialect, body: Any) -> None:
    [message] = dialect.read({"model": "m", "max_tokens": 9, **body}).messages
    assert message["content"] == [{"type": "image", "image": URI}]
