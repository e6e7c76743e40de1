"""`PicturePool` preprocesses the pictures of prompts in processes beside a rollout actor, each picture once.

prompt -> read in a worker process -> image processor -> tensors -> Blob (digest) -> all samples of the prompt
             |                                                          |
             same picture in another prompt: the same task, or kept in memory (least recently used first out)
"""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
import xxhash

from ..engines.tokenizer import load_tokenizer
from .config import ImagesConfig
from .processor import PictureProcessor, Prepared, Processed
from .prompt_pictures import BadPicture, Picture, PictureCounts, filled, picture_of, pictures_in


class PicturePool:
    """Preprocesses pictures in processes of its own. Its methods are called from one event loop."""

    def __init__(self, config: ImagesConfig, model: str, tokenizer_path: str, tokenizer: Any) -> None:
        """model: folder or hub id of the model. tokenizer_path: where the worker processes load `tokenizer` from.
        Raises ValueError if the model has no processor of pictures."""
        self.processor = PictureProcessor(config, model, tokenizer)
        self.counts = PictureCounts()
        """Counts since the start of the pool."""
        self._taken = PictureCounts()
        self._workers, self._arguments = config.workers, (config, model, tokenizer_path)
        self._pool = self._start()
        self._room = config.cache_mib << 20
        self._kept: OrderedDict[str, Prepared] = OrderedDict()
        self._kept_bytes = 0
        self._running: dict[str, asyncio.Task[Prepared]] = {}

    def warm_up(self) -> None:
        """Start the processes, so that the first pictures do not wait for them."""
        for _ in range(self._workers):
            self._pool.submit(os.getpid)

    def take_counts(self) -> PictureCounts:
        """Return the counts since the last call."""
        new, self._taken = self.counts - self._taken, self.counts
        return new

    async def prepare(self, pictures: Sequence[Picture]) -> list[Prepared]:
        """Return the pictures, preprocessed, in order. Raises BadPicture, which names the picture, if one of them
        cannot be read or processed."""
        return list(await asyncio.gather(*map(self._prepare, pictures)))

    async def show(
        self, messages: Sequence[Mapping[str, Any]], place: str, given: Sequence[Prepared] = ()
    ) -> tuple[list[Mapping[str, Any]], tuple[Prepared, ...]]:
        """Return chat messages in which `{"type": "image"}` stands for each picture, and the pictures, preprocessed.

        The pictures are bytes, PIL images or data URIs, because others could make this process read files or addresses.
        given: pictures for the parts without a picture of their own, if there are such parts. Raises BadPicture, naming
        the place and the picture.
        """
        plain, found = pictures_in(messages, place)
        of_parts = {
            at: picture_of(value, f"{place}, picture {at}", folder=None, allow_urls=False)
            for at, value in enumerate(found)
            if value is not None
        }
        prepared = dict(zip(of_parts, await self.prepare(list(of_parts.values())), strict=True))
        shown = [prepared.get(at) for at in range(len(found))]
        fitting = given if len(prepared) < len(found) else ()
        return plain, tuple(filled(shown, fitting, f"{place}: the messages have", "the prompt has {}"))

    async def close(self) -> None:
        """End the processes. Idempotent."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    def _start(self) -> ProcessPoolExecutor:
        """Return a new pool. Its processes start when they are needed."""
        # This process has threads, which a fork would break.
        return ProcessPoolExecutor(self._workers, multiprocessing.get_context("spawn"), _load, self._arguments)

    async def _prepare(self, picture: Picture) -> Prepared:
        # The bytes name the picture, as two paths can have the same content and one path can change its content.
        data = picture.data or await asyncio.to_thread(picture.read)
        name = xxhash.xxh3_128_hexdigest(data)
        if (kept := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
            self.counts += PictureCounts(reused=1)
            return kept
        if (task := self._running.get(name)) is None:
            task = self._running[name] = asyncio.create_task(self._process(name, data))
            task.add_done_callback(lambda ended: self._forget(name, ended))
        else:
            self.counts += PictureCounts(reused=1)
        try:
            # A prompt that is cancelled must not end the task, because other prompts can wait for it.
            return await asyncio.shield(task)
        except BadPicture as error:  # Each prompt names its own place of the picture.
            raise BadPicture(f"{picture.place}: {error}") from error

    def _forget(self, name: str, ended: asyncio.Task[Prepared]) -> None:
        del self._running[name]
        if not ended.cancelled():
            ended.exception()  # It was raised in the prompts that waited. All of them may have been cancelled.

    async def _process(self, name: str, data: bytes) -> Prepared:
        processed = await self._run(data)
        prepared = await asyncio.to_thread(self.processor.prepared, processed)
        self.counts += PictureCounts(processed=1, num_bytes=prepared.num_bytes, seconds=processed.seconds)
        if prepared.num_bytes <= self._room:
            self._kept[name] = prepared
            self._kept_bytes += prepared.num_bytes
            while self._kept_bytes > self._room:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.num_bytes
        return prepared

    async def _run(self, data: bytes) -> Processed:
        """Preprocess an encoded picture in a process of the pool."""
        pool = self._pool
        try:
            return await asyncio.wrap_future(pool.submit(_process, data))
        except BrokenProcessPool:
            # Any picture of the pool can have ended the process, so each is tried once more.
            if pool is self._pool:
                self._pool = self._start()
        try:
            return await asyncio.wrap_future(self._pool.submit(_process, data))
        except BrokenProcessPool as error:
            raise BadPicture("a process died while it preprocessed this picture, twice") from error


_loaded: PictureProcessor | None = None
"""Processor of this process, if it is a worker of a pool."""


def _load(config: ImagesConfig, model: str, tokenizer_path: str) -> None:
    """Prepare a worker process: load the processor, and end with the process that started this one."""
    global _loaded
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; this one ends with its parent.
    torch.set_num_threads(1)
    _loaded = PictureProcessor(config, model, load_tokenizer(tokenizer_path))


def _process(data: bytes) -> Processed:
    assert _loaded is not None
    return _loaded.process(data)
