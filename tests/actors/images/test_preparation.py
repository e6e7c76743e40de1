"""The processes that preprocess pictures: each picture once, and an end with the process that wants them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from headrace.actors.engines.config import EngineKeys, ModelConfig
from headrace.actors.engines.factory import EngineConfig
from headrace.actors.environments.config import EndpointConfig, EnvironmentConfig
from headrace.actors.images import preparation
from headrace.actors.images.config import ImagesConfig
from headrace.actors.images.preparation import PicturePool
from headrace.actors.images.prompt_pictures import BadPicture, Picture, PictureCounts
from headrace.actors.rewards.config import RewardConfig
from headrace.actors.rollout.actor import RolloutActor, RolloutSetup
from headrace.actors.rollout.data_config import DataConfig
from headrace.testing.data_plane import open_plane
from headrace.tests.actors.images.tiny_vision import draw, encoded

pytestmark = [pytest.mark.processes, pytest.mark.slow]  # A worker process imports transformers.


def pictures(*seeds: int) -> list[Picture]:
    return [Picture(f"picture {number}", encoded(draw(100, 60, seed))) for number, seed in enumerate(seeds)]


def test_a_picture_is_preprocessed_once(
    vision_folder: str, vision_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        config = ImagesConfig(enabled=True, workers=1, cache_mib=1)
        pool = PicturePool(config, vision_folder, vision_folder, vision_tokenizer)
        try:
            found = await asyncio.gather(*(pool.prepare(pictures(0, 1, 0)) for _ in range(4)))
            assert pool.counts.processed == 2 and pool.counts.reused == 10
            names = [[one.blob.name for one in each] for each in found]
            assert names == [names[0]] * 4 and names[0][0] == names[0][2] != names[0][1]
            inside = pool.processor.prepared(pool.processor.process(pictures(0)[0].data))
            assert inside.blob.name == names[0][0], "the tensors of a worker are those of this process"
            await pool.prepare(pictures(*range(2, 10)))  # The room of the cache is that of 6 pictures.
            await pool.prepare(pictures(9, 0))
            assert pool.counts.processed == 11 and pool.counts.reused == 11
            taken = pool.take_counts()
            assert taken == pool.counts and taken.num_bytes > 0 and taken.seconds > 0
            assert pool.take_counts() == PictureCounts(), "the next report begins at 0"
            bad = [Picture(f"picture {number}", b"none") for number in range(2)]
            results = await asyncio.gather(*map(pool._prepare, bad), return_exceptions=True)
            assert [str(one)[:16] for one in results] == ["picture 0: got 4", "picture 1: got 4"]
            assert all(isinstance(one, BadPicture) for one in results)
            [child] = map(psutil.Process, pool.pids)
            child.kill()
            child.wait()
            await pool.prepare(pictures(20))
            assert pool.counts.processed == 12, "another process takes the place of the one that was killed"
            [child] = map(psutil.Process, pool.pids)
            shared = [one.path for one in child.memory_maps() if one.path.startswith("/dev/shm")]
            assert not shared, "Ray ends actors in a way that would leave them there"
            child.suspend()
            monkeypatch.setattr(preparation, "PROCESS_S", 0.1)
            with pytest.raises(BadPicture, match=r"^picture 0: its preprocessing takes more than 0.1 s"):
                await pool.prepare(pictures(21))
            assert not child.is_running() and not pool.pids
        finally:
            await pool.close()
        assert not spawned()

    asyncio.run(run())


KILLED = """
import asyncio, os, sys
from headrace.actors.engines.tokenizer import load_tokenizer
from headrace.actors.images.config import ImagesConfig
from headrace.actors.images.prompt_pictures import Picture
from headrace.actors.images.preparation import PicturePool
from headrace.tests.actors.images.tiny_vision import draw, encoded

async def run(folder):
    pool = PicturePool(ImagesConfig(enabled=True, workers=1), folder, folder, load_tokenizer(folder))
    await pool.prepare([Picture("p", encoded(draw(60, 60)))])
    print(*pool.pids, flush=True)
    await asyncio.sleep(3600)

if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
"""


def test_the_processes_end_with_the_one_that_started_them(vision_folder: str, tmp_path: Any) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, script, vision_folder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        os.kill(process.pid, signal.SIGKILL)
        assert psutil.wait_procs([worker], timeout=20)[0], "the worker outlives its parent"


def test_the_processes_end_if_their_actor_cannot_be_built(vision_folder: str, tmp_path: Any) -> None:
    images = {"images": {"enabled": True, "workers": 1}}
    model, scripted = ModelConfig(path=vision_folder), EngineKeys(engine="scripted")
    data = DataConfig.model_validate({"train": str(tmp_path / "missing.jsonl"), **images})

    async def run() -> None:
        with open_plane() as plane:
            actor = RolloutActor(
                RolloutSetup(
                    "rollout 0", 1, 0, EngineConfig(scripted, model), EndpointConfig(), EnvironmentConfig(), model,
                    vision_folder, RewardConfig(), data, (), True, plane.handle,
                )
            )  # fmt: skip
            with pytest.raises(ValueError, match=r"missing.jsonl"):
                await actor.build()
            assert spawned(), "they were started"
            await actor.close()
            assert not spawned()

    asyncio.run(run())


def spawned() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
