"""`PicturePool` preprocesses the pictures of prompts in processes beside a rollout actor, each picture once.

prompt -> read in a worker process -> image processor -> tensors -> Blob (digest) -> all samples of the prompt
             |                                                          |
             same picture in another prompt: the same task, or kept in memory (least recently used first out)
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import signal
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash

from ..engines.tokenizer import load_tokenizer
from .config import ImagesConfig
from .processor import PictureProcessor, Prepared, Processed
from .prompt_pictures import BadPicture, Picture, PictureCounts, filled, picture_of, pictures_in

PROCESS_S = 120.0
"""Longest time in seconds that a process may take to start, or to preprocess a picture."""
READERS = 16
"""Number of pictures that a pool reads or fetches at the same time."""


class PicturePool:
    """Preprocesses pictures in processes of its own. Its methods are called from one event loop."""

    def __init__(self, config: ImagesConfig, model: str, tokenizer_path: str, tokenizer: Any) -> None:
        """model: folder or hub id of the model. tokenizer_path: where the worker processes load `tokenizer` from.
        Raises ValueError if the model has no processor of pictures."""
        self.processor = PictureProcessor(config, model, tokenizer)
        self.counts = PictureCounts()
        """Counts since the start of the pool."""
        self._taken = PictureCounts()
        self._arguments = config, model, tokenizer_path
        self._threads = ThreadPoolExecutor(config.workers, "pictures")
        # Slow servers and disks hold up only these threads, and not others of this process.
        self._readers = ThreadPoolExecutor(READERS, "picture-files")
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._closed = False
        self._room = config.cache_mib << 20
        self._kept: OrderedDict[str, Prepared] = OrderedDict()
        self._kept_bytes = 0
        self._running: dict[str, asyncio.Task[Prepared]] = {}

    def warm_up(self) -> None:
        """Start the processes, so that the first pictures do not wait for them."""
        for _ in range(self._arguments[0].workers):
            self._free.put(self._started())

    @property
    def pids(self) -> list[int | None]:
        """Ids of the processes."""
        return [worker.pid for worker in self._all]

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
        self._closed = True
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        for worker in list(self._all):
            worker.kill()  # The thread that waits for it returns.
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in list(self._all):
            self._discard(worker)

    async def _prepare(self, picture: Picture) -> Prepared:
        # The bytes name the picture, as two paths can have the same content and one path can change its content.
        data = picture.data or await asyncio.get_running_loop().run_in_executor(self._readers, picture.read)
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
        """Preprocess an encoded picture in a process."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._processed, data)

    def _processed(self, data: bytes) -> Processed:
        for _ in range(2):  # Something else can have ended the process, such as a lack of memory.
            if self._closed:
                break
            try:
                worker = self._free.get_nowait()
            except queue.Empty:
                worker = self._started()
            try:
                answer = worker.process(data)
            except (EOFError, OSError) as error:
                self._discard(worker)
                if isinstance(error, TimeoutError):
                    raise BadPicture(f"its preprocessing takes more than {PROCESS_S:g} s") from None
                continue
            self._free.put(worker)
            if isinstance(answer, BadPicture):
                raise answer
            return answer
        raise BadPicture("a process died while it preprocessed this picture, twice")

    def _started(self) -> _Worker:
        worker = _Worker(*self._arguments)
        self._all.add(worker)
        return worker

    def _discard(self, worker: _Worker) -> None:
        worker.kill()
        self._all.discard(worker)


class _Worker:
    """A process that preprocesses one picture after another. It ends with this one.

    It has only a pipe. The queues of a pool would have named semaphores, which stay in /dev/shm if Ray ends an actor.
    """

    def __init__(self, config: ImagesConfig, model: str, tokenizer_path: str) -> None:
        context = multiprocessing.get_context("spawn")  # This process has threads, which a fork would break.
        self._pipe, theirs = context.Pipe()
        arguments = theirs, config, model, tokenizer_path
        self._process = context.Process(target=_serve, args=arguments, name="pictures", daemon=True)
        self._process.start()
        theirs.close()
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """Id of the process."""
        return self._process.pid

    def process(self, data: bytes) -> Processed | BadPicture:
        """Return the preprocessed picture, or what is wrong with it. Raises EOFError or OSError if the process has
        died, and TimeoutError if it takes too long."""
        if not self._is_ready:
            self._received()
            self._is_ready = True
        self._pipe.send_bytes(data)
        return self._received()

    def _received(self) -> Any:
        if not self._pipe.poll(PROCESS_S):
            raise TimeoutError
        return self._pipe.recv()

    def kill(self) -> None:
        """End the process. A thread in `process` gets an error. Idempotent."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, config: ImagesConfig, model: str, tokenizer_path: str) -> None:
    """Preprocess the pictures that come through a pipe, until its other end is closed. The first answer is None, once
    this process is ready."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; this one ends with its parent.
    torch.set_num_threads(1)
    processor = PictureProcessor(config, model, load_tokenizer(tokenizer_path))
    answer: Processed | BadPicture | None = None
    with suppress(EOFError, ConnectionError):  # The process that started this one has ended.
        while True:
            pipe.send(answer)
            data = pipe.recv_bytes()
            try:
                answer = processor.process(data)
            except BadPicture as error:
                answer = error
