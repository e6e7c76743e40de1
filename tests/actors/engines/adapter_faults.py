"""Faults of each message of an adapter's sync to an engine: lost, damaged, late, twice, or of another base.

    announcement, buckets -> prepare    commit -> commit    digests -> verify -> probe

`FAULTS` is the table. A fault is refused with an error that names it, or it is harmless.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.adapters.base_digest import base_digest
from headrace.actors.adapters.spec import AdapterSpec
from headrace.actors.engines.protocol import EngineBroken, SamplingParams
from headrace.actors.weight_sync.transports.protocol import WeightTransferError, WeightUpdate
from headrace.codecs.weights.parameter_digests import DigestTaker, ParameterDigests
from headrace.tests.actors.weight_sync.weight_updates import Publisher

PROMPT = [5, 6, 7, 13]
PARAMS = SamplingParams(n=2, max_new_tokens=8, seed=3)
Named = dict[str, torch.Tensor]


class AdapterSync:
    """The messages of a trainer and a driver to one engine, which tests lose, damage, delay or repeat."""

    def __init__(self, engine: Any, model: str, folder: Path, silence: Callable[[], Any]) -> None:
        """silence: returns a context in which the engine computes with the base, whichever adapter it holds."""
        self.engine, self.silence = engine, silence
        self.spec = AdapterSpec(rank=4, alpha=8.0, base=base_digest(model))
        self._folder = folder
        self._publisher = Publisher(folder)

    @property
    def next(self) -> int:
        return self.engine.version + 1

    def announce(self, version: int, named: Named, *, sent: bool = True, **spec: Any) -> WeightUpdate:
        update = (self._publisher.publish if sent else self._publisher.announce)(version, named)
        bound_s = update.timeout_s if sent else 0.5
        return replace(update, timeout_s=bound_s, adapter=replace(self.spec, **spec))

    def damage(self) -> None:
        """Change the last byte of the newest bucket on its way."""
        bucket = max(self._folder.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        with bucket.open("r+b") as file:
            file.seek(-1, 2)
            [last] = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))

    async def commit(self, version: int, named: Named) -> None:
        assert await self.engine.prepare_weights(self.announce(version, named)) == "staged"
        await self.engine.commit_weights(version)

    async def serve(self, version: int, named: Named) -> None:
        await self.commit(version, named)
        assert await self.engine.verify_weights(digests_of(version, named)) == len(named)

    async def answer(self) -> list[tuple[list[int], list[float], set[int]]]:
        found = await self.engine.generate("same", PROMPT, PARAMS)
        return [(one.token_ids.tolist(), one.logprobs.tolist(), set(one.versions.tolist())) for one in found]

    def close(self) -> None:
        self._publisher.close()


def digests_of(version: int, named: Named) -> ParameterDigests:
    taker = DigestTaker(version, list(named))
    for name, tensor in named.items():
        taker.take(name, tensor)
    return taker.result()


async def no_announcement(sync: AdapterSync, new: Named) -> None:
    await sync.engine.commit_weights(sync.next)


async def announcement_without_adapter(sync: AdapterSync, new: Named) -> None:
    await sync.engine.prepare_weights(replace(sync.announce(sync.next, new), adapter=None))


async def announcement_of_another_rank(sync: AdapterSync, new: Named) -> None:
    await sync.engine.prepare_weights(sync.announce(sync.next, new, rank=3))


async def announcement_of_another_base(sync: AdapterSync, new: Named) -> None:
    await sync.engine.prepare_weights(sync.announce(sync.next, new, base="0" * 32))


async def late_announcement(sync: AdapterSync, new: Named) -> None:
    late = sync.announce(sync.engine.version, new)
    await sync.engine.prepare_weights(replace(late, version=sync.engine.version - 1))


async def announcement_twice(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    update = sync.announce(version, new)
    assert [await sync.engine.prepare_weights(update) for _ in range(2)] == ["staged"] * 2
    await sync.engine.commit_weights(version)
    assert await sync.engine.verify_weights(digests_of(version, new)) == len(new)


async def no_buckets(sync: AdapterSync, new: Named) -> None:
    await sync.engine.prepare_weights(sync.announce(sync.next, new, sent=False))


async def late_buckets(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    with pytest.raises(WeightTransferError, match=f"version {version}"):
        await sync.engine.prepare_weights(sync.announce(version, new, sent=False))
    sync.announce(version, new)
    await sync.engine.commit_weights(version)


async def damaged_bucket(sync: AdapterSync, new: Named) -> None:
    update = sync.announce(sync.next, new)
    sync.damage()
    await sync.engine.prepare_weights(update)


async def buckets_twice(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    sync.announce(version, new)
    await sync.serve(version, new)


async def late_commit(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    await sync.engine.prepare_weights(sync.announce(version, new))
    await sync.engine.drop_weights(version)
    await sync.engine.commit_weights(version)


async def no_commit(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    await sync.engine.prepare_weights(sync.announce(version, new))
    await sync.engine.verify_weights(digests_of(version, new))


async def commit_of_another_version(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    await sync.engine.prepare_weights(sync.announce(version, new))
    await sync.engine.commit_weights(version + 1)


async def commit_twice(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    await sync.serve(version, new)
    await sync.engine.commit_weights(version)


async def no_digests(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    await sync.commit(version, new)
    await sync.engine.verify_weights(ParameterDigests(version, ()))


async def one_digest_lost(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    await sync.commit(version, new)
    digests = digests_of(version, new)
    await sync.engine.verify_weights(replace(digests, weights=digests.weights[:-1]))


async def damaged_digest(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    await sync.commit(version, new)
    first, *others = digests_of(version, new).weights
    await sync.engine.verify_weights(ParameterDigests(version, (replace(first, digest=first.digest ^ 1), *others)))


async def late_digests(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    await sync.serve(version, new)
    await sync.engine.verify_weights(digests_of(version - 1, new))


async def digests_twice(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    await sync.serve(version, new)
    assert await sync.engine.verify_weights(digests_of(version, new)) == len(new)


async def digests_of_another_adapter(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    await sync.commit(version, new)
    await sync.engine.verify_weights(digests_of(version, {name: 2 * tensor for name, tensor in new.items()}))


async def silent_probe(sync: AdapterSync, new: Named) -> None:
    version = sync.next
    await sync.commit(version, new)
    with sync.silence():
        await sync.engine.verify_weights(digests_of(version, new))


Fault = Callable[[AdapterSync, Named], Awaitable[None]]
UNPREPARED = "got version {next} to commit, expected the prepared one, [Nn]one"
FAULTS: dict[str, tuple[Fault, str]] = {
    # name: (fault, error, in which {next} is the version after that in service; "" if the fault is harmless)
    "announcement lost": (no_announcement, UNPREPARED),
    "announcement without its adapter": (announcement_without_adapter, r"base_model\.model\."),
    "announcement with another rank": (announcement_of_another_rank, r"shape \(4, .*expected 3|rank 3"),
    "announcement of another base": (announcement_of_another_base, "base.* digest 0{32}, expected {base}"),
    "announcement late": (late_announcement, "got version {old}, expected the current {now} or a later one"),
    "announcement twice": (announcement_twice, ""),
    "buckets lost": (no_buckets, "version {next}.*bucket 0"),
    "buckets late": (late_buckets, UNPREPARED),
    "bucket damaged": (damaged_bucket, "version {next}.*checksum"),
    "buckets twice": (buckets_twice, ""),
    "commit lost": (no_commit, "version {next} cannot be verified, because"),
    "commit late": (late_commit, UNPREPARED),
    "commit of another version": (commit_of_another_version, "to commit, expected the prepared one, {next}"),
    "commit twice": (commit_twice, ""),
    "digests lost": (no_digests, "version {next} differs from the trainer's: .*is in one of them only"),
    "digest of one matrix lost": (one_digest_lost, "version {next} differs from the trainer's: .* in one of them only"),
    "digest damaged": (damaged_digest, "version {next}: '.*lora_[AB].weight' has digest"),
    "digests late": (late_digests, "version {now} cannot be verified, because"),
    "digests twice": (digests_twice, ""),
    "digests of another adapter": (digests_of_another_adapter, "version {next}: '.*lora_[AB].weight' has digest"),
    "probe silent": (silent_probe, "adapter of version {next} (changes nothing|has no effect)"),
}  # fmt: skip


async def check(sync: AdapterSync, name: str, old: Named, new: Named) -> None:
    """Check that a fault is refused in one line, with the old version in service, and that the next sync succeeds.

    old, new: adapters of the version before and of the version with the fault.
    """
    fault, message = FAULTS[name]
    await sync.serve(sync.next, old)
    before, version = await sync.answer(), sync.engine.version
    if not message:
        await fault(sync, new)
        assert {one[2].pop() for one in await sync.answer()} == {version + 1}
    else:
        names = {"next": version + 1, "now": version, "old": version - 1, "base": sync.spec.base}
        for key, value in names.items():
            message = message.replace(f"{{{key}}}", str(value))
        with pytest.raises((ValueError, WeightTransferError, EngineBroken), match=message) as refused:
            await fault(sync, new)
        assert "\n" not in str(refused.value)
        if refused.type is not EngineBroken and sync.engine.version == version:
            assert await sync.answer() == before
    await sync.serve(sync.engine.version + 1, old)
    after = await sync.answer()
    assert [one[:2] for one in after] == [one[:2] for one in before]
    assert {one[2].pop() for one in after} == {sync.engine.version}
