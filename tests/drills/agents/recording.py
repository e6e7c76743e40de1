"""The hook of the drills over agents: every answer of the engine is random and on disk before anyone sees it.

It stands on the hook of the chaos drill, whose notes say which rows were put, read and trained. Notes of this hook say
which tokens the engine made, and which tokens were put.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import xxhash

from headrace.tests.drills.chaos import hook
from headrace.tests.drills.chaos.faulty_calls import Faults

SITE = "import headrace.tests.drills.agents.recording as recording\nrecording.install()\n"
TOKENS = range(8, 24)
"""Token ids of which the answers consist."""
_dice = random.SystemRandom()  # A request that is made again gets another answer, which a replay does not.


def digest(ids: Sequence[int] | np.ndarray) -> str:
    """Return a digest of the tokens that an answer continues."""
    return xxhash.xxh3_64_hexdigest(np.asarray(ids, np.int32).tobytes())


def _note_answers(module: ModuleType, faults: Faults) -> None:
    engine: Any = module.ScriptedEngine
    generate = engine.generate

    @functools.wraps(generate)
    async def noted(self: Any, request_id: str, prompt_ids: Sequence[int], params: Any) -> Any:
        answers = [_drawn(one) for one in await generate(self, request_id, prompt_ids, params)]
        made = [[one.token_ids.tolist(), one.logprobs.tolist()] for one in answers]
        faults.control.note(made=request_id, after=digest(prompt_ids), answers=made)
        return answers

    engine.generate = noted


def _drawn(completion: Any) -> Any:
    count = len(completion.token_ids)
    return dataclasses.replace(
        completion,
        token_ids=np.array(_dice.choices(TOKENS, k=count), np.int32),
        logprobs=np.array([-_dice.random() for _ in range(count)], np.float32),
    )


def _note_tokens(module: ModuleType, faults: Faults) -> None:
    client: Any = module.AsyncDataPlaneClient
    put = client.put

    @functools.wraps(put)
    async def noted(self: Any, partition: str, keys: Sequence[str], fields: Any, **named: Any) -> Any:
        names = ("input_ids", "response_mask", "rollout_logprobs")
        columns = [fields.jagged(name) for name in names]
        ends = np.cumsum(columns[0].lengths)[:-1]
        rows = zip(*(np.split(column.values.numpy(), ends) for column in columns), strict=True)
        tokens = [[part.tolist() for part in row] for row in rows]
        faults.control.note(tokens=tokens, keys=list(keys), plane=self.plane_id, partition=partition)
        return await put(self, partition, keys, fields, **named)

    client.put = noted


def _both(first: Callable[..., None] | None, second: Callable[..., None]) -> Callable[..., None]:
    def patch(module: ModuleType, faults: Faults) -> None:
        if first is not None:
            first(module, faults)
        second(module, faults)

    return patch


def install() -> None:
    """Install the patches of both hooks, if the environment says that this process belongs to a drill."""
    for name, patch in (
        ("headrace.actors.engines.scripted", _note_answers),
        ("headrace.dataplane.client.async_client", _note_tokens),
    ):
        hook.PATCHES[name] = _both(hook.PATCHES.get(name), patch)
    hook.install()
