"""Serves adapters (LoRA) in vLLM: each version has a slot of its own, which its requests use until they have ended.

    prepare   the workers' inboxes receive and verify an adapter, as they do with weights; `AdapterStore.check`
    commit    `AdapterStore.stage` in each worker -> vLLM's `add_lora` chooses a slot, which is then filled
    request   carries the number of its version, with which vLLM picks the slot and hashes cached prefixes
    verify    the tensors as sent against the trainer's digests, the slot against those tensors, then a probe
    remove    at a later commit, once the last request of the version has ended

vLLM would read an adapter from files. Here its tensors come from `AdapterStore`, in the thread that runs the model, so
that no slot changes during a step. Where vLLM would silently remove an adapter to make room, that is an error.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ....codecs.weights.parameter_digests import ParameterDigest, ParameterDigests, compare_digests
from ...adapters.base_digest import base_digest
from ...adapters.slot_memory import AdapterMemory, layout_of
from ...adapters.spec import PARTS, AdapterSlots, AdapterSpec, largest_numbers, module_pairs, must_show, tensor_names
from ...weight_sync.transports.protocol import WeightUpdate
from . import library
from .process import HeldAdapter, VerifyReport, VllmProcess
from .weight_names import WeightNames

FIRST_NUMBER = 1001
"""Number of the first adapter in vLLM. Lower numbers are those of the adapters with which vLLM warms up."""
PROBE_TOKENS = 16


def check_slots(slots: AdapterSlots) -> None:
    """Raise ValueError if there are too few slots, or if adapters of stacked experts are to come."""
    if slots.count < 2:
        raise ValueError(f"adapters: got {slots.count} slots, expected at least 2, for a new version beside the old")
    if slots.experts:
        raise ValueError(
            "trainer.lora.experts: got true, expected false, because the vllm engine takes no adapters of stacked "
            "experts; sync.adapter=merged sends it whole weights"
        )


class HeldAdapters:
    """The versions of adapters that one engine holds, and their use by requests."""

    def __init__(
        self, process: VllmProcess, slots: AdapterSlots, model: str, beside: HeldAdapters | None = None
    ) -> None:
        """model: folder or hub id of the base. beside: versions of the engine itself, if this object is for one of
        several runs that share it; the numbers of all versions are different."""
        self._process = process
        self.slots = slots
        self._model = model
        self._beside = beside
        self._base: asyncio.Future[str] | None = None
        self._held: list[HeldAdapter] = []
        self._numbers: Iterator[int] = itertools.count(FIRST_NUMBER) if beside is None else beside._numbers
        self.current: HeldAdapter | None = None
        """Version that new requests use; None if they use the base alone."""

    async def check(self, update: WeightUpdate, spec: AdapterSpec) -> None:
        """Raise ValueError unless the adapter fits into a slot and belongs to the engine's base. The first call reads
        the whole base in a thread."""
        if spec.rank > self.slots.rank:
            raise ValueError(
                f"adapter: version {update.version} has rank {spec.rank}, expected at most {self.slots.rank}, with "
                "which the engine was started"
            )
        base = await self.digest()
        if spec.base != base:
            raise ValueError(
                f"adapter: version {update.version} belongs to a base with digest {spec.base}, expected {base}, the "
                f"digest of {self._model!r} when the engine read it"
            )

    async def digest(self) -> str:
        """Return the digest of the base's files at the time of the first call, which reads all of them."""
        if self._beside is not None:
            return await self._beside.digest()
        if self._base is None or (self._base.done() and self._base.exception() is not None):
            self._base = asyncio.ensure_future(asyncio.to_thread(base_digest, self._model))
        return await asyncio.shield(self._base)

    def begin(self) -> HeldAdapter | None:
        """Count a new request to the version in service, and return that version. None: the base alone."""
        if self.current is not None:
            self.current.num_requests += 1
        return self.current

    def end(self, held: HeldAdapter | None) -> None:
        """Count the end of a request that began with `held`."""
        if held is not None:
            held.num_requests -= 1

    @property
    def full(self) -> bool:
        """True if no slot is free."""
        return len(self._held) >= self.slots.count

    def new(self, version: int) -> HeldAdapter:
        """Take a free slot for `version`, whose tensors the workers are about to stage."""
        assert not self.full
        number = next(self._numbers)
        # The prefix cache must tell two loads of the same version apart.
        held = HeldAdapter(version, number, library.adapter_request(f"version {version} as {number}", number))
        self._held.append(held)
        return held

    async def serve(self, held: HeldAdapter) -> None:
        """Make vLLM copy the staged tensors into a slot, and put the version into service."""
        if not await self._process.add_adapter(held):
            raise RuntimeError(f"vLLM did not take the adapter of version {held.version}")
        self.current = held

    async def remove(self, held: HeldAdapter) -> None:
        """Free the slot of a version that no request uses. If it was in service, nothing is afterwards."""
        if self.current is held:
            self.current = None
        if held in self._held:
            await self._process.call("headrace_remove_adapter", held.number)
            self._held.remove(held)

    async def remove_all(self) -> None:
        """Free the slots of all versions. No request may use one."""
        self.current = None
        await self.remove_old()

    async def remove_old(self) -> None:
        """Free the slots of all versions that are not in service and that no request uses."""
        for held in [held for held in self._held if held is not self.current and not held.num_requests]:
            await self.remove(held)

    async def probe(self, held: HeldAdapter) -> None:
        """Compare the answers to a fixed prompt of 16 tokens with the adapter and without it. Raises RuntimeError if
        the log-prob of the most probable next token is the same."""
        size = min(PROBE_TOKENS, self._process.context - 1)
        prompt = [(7 * place + 3) % self._process.vocab_size for place in range(size)]
        changed, base = await asyncio.gather(*(self._process.probe(prompt, one) for one in (held, None)))
        if changed == base:
            token, logprob = base
            raise RuntimeError(
                f"the adapter of version {held.version} changes nothing: after {size} fixed tokens, token {token} has "
                f"log-prob {logprob} with it and without it, although its matrices B are not zero"
            )


@dataclass(slots=True)
class KeptAdapter:
    """An adapter in a worker: its tensors as they were sent, and vLLM's LoRAModel with them until vLLM takes it."""

    version: int
    spec: AdapterSpec
    memory: AdapterMemory
    model: Any


class AdapterStore:
    """The adapters of one worker. It hands vLLM the tensors of an adapter, and keeps them as they were sent.

    The worker's main thread, in which vLLM runs, calls `remove` and asks for tensors. Another one calls the rest.
    """

    def __init__(self, manager: Any, names: WeightNames) -> None:
        """manager: vLLM's WorkerLoRAManager, which from now on gets adapters from here only."""
        self._manager = manager
        self._names = names
        parts = library.adapter_parts(manager)
        self._linear = [name for name in names.linear if library.adapter_part(manager, tensor_names(name)[0]) in parts]
        self._kept: dict[int, KeptAdapter] = {}
        self._free: list[AdapterMemory] = []
        """Memory of adapters that were removed, for later ones."""
        manager.remove_all_adapters()
        manager._load_adapter = self._hand_over
        self._add = manager.add_adapter
        manager.add_adapter = self._into_slot

    def check(self, named: Mapping[str, torch.Tensor], spec: AdapterSpec) -> None:
        """Raise ValueError, which names a tensor, if the adapter does not fit the model or is not finite."""
        for module, (first, second) in module_pairs(named, spec.rank, self._linear).items():
            expected = self._names.shape(f"{module}.weight")
            if (len(second), first.shape[1]) != expected:
                raise ValueError(
                    f"adapter: the matrices of {module!r} make a weight of shape {(len(second), first.shape[1])}, "
                    f"expected {tuple(expected)}"
                )
        if not named:
            raise ValueError("adapter: got no tensors, expected those of at least one module")
        finite = largest_numbers(list(named.values())).isfinite().tolist()
        if not all(finite):
            raise ValueError(f"adapter: {list(named)[finite.index(False)]} has numbers that are not finite")

    def stage(self, number: int, version: int, spec: AdapterSpec, named: Mapping[str, torch.Tensor]) -> None:
        """Copy an adapter's tensors, and keep them for vLLM, which will ask for adapter `number`."""
        layout = layout_of(named)
        while self._free and (self._free[-1].layout != layout or self._free[-1].rank != spec.rank):
            self._free.pop()
        memory = self._free.pop() if self._free else self._memory(spec.rank, named)
        memory.take(named, spec.scaling)
        # Two matrices stand for all if these are copied into the slot without vLLM, which needs some.
        told = dict(itertools.islice(memory.sent.items(), 2)) if memory.repeatable else memory.sent
        model = self._model(number, spec, told)
        self._kept[number] = KeptAdapter(version, spec, memory, model)

    def remove(self, number: int) -> None:
        """Remove an adapter from vLLM and from here. Idempotent."""
        self._manager.remove_adapter(number)
        if (kept := self._kept.pop(number, None)) is not None:
            self._free.append(kept.memory)

    def verify(self, number: int, digests: ParameterDigests, engine: str) -> VerifyReport:
        """Compare the tensors of adapter `number` with the trainer's digests, and its slot with the tensors. engine:
        name of the engine, for errors."""
        kept = self._kept[number]
        named = kept.memory.sent

        def sent(weight: ParameterDigest) -> list[torch.Tensor]:
            tensor = named.get(weight.name)
            if tensor is None or not weight.fits(tensor):
                got = "was not sent" if tensor is None else f"has dtype {tensor.dtype} and shape {tuple(tensor.shape)}"
                raise ValueError(f"{weight.name!r} {got}, the trainer's is {weight.dtype} of shape {weight.shape}")
            return [tensor]

        count, error = compare_digests(digests, sent, engine)
        about = f"{engine}: adapter of version {kept.version}"
        if not error and (unlike := sorted({weight.name for weight in digests.weights} ^ named.keys())):
            error = f"{about} differs from the trainer's: {unlike[0]!r} is in one of them only"
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM's thread has queued copies into the slot.
        if not error:
            wrong = self._slot_difference(number, kept)
            error = wrong and f"{about}: {wrong}"
        pairs = module_pairs(named, kept.spec.rank).values()
        dtype = self._manager.lora_config.lora_dtype
        return VerifyReport(count, error, must_show(kept.spec, pairs, dtype))

    def _memory(self, rank: int, named: Mapping[str, torch.Tensor]) -> AdapterMemory:
        manager = self._manager
        note = partial(library.noted_copies, manager, rank)
        return AdapterMemory(rank, named, manager.lora_config.lora_dtype, manager.device, note)

    def _slot_difference(self, number: int, kept: KeptAdapter) -> str:
        """Describe how the slot of an adapter differs from its tensors; "" if it does not. vLLM itself makes a slot of
        them when copies go into this slot for the first time, and when something differs."""
        memory, slot = kept.memory, library.slot_of(self._manager, number)
        if memory.repeatable and slot in memory.proven:
            memory.scale(kept.spec.scaling)
            if not memory.differs(slot):
                return ""
        wrong = library.slot_difference(self._manager, self._model(number, kept.spec, memory.sent))
        if not wrong and slot is not None:
            memory.proven.add(slot)
        return wrong

    def _into_slot(self, request: Any) -> bool:
        """Make vLLM take an adapter into a slot, unless it has one. Replaces `WorkerLoRAManager.add_adapter`."""
        kept = self._kept.get(request.lora_int_id)
        if kept is None or not kept.memory.repeatable:
            return self._add(request)
        return library.activated(self._manager, request, self._add, kept.memory.write)

    def _model(self, number: int, spec: AdapterSpec, named: Mapping[str, torch.Tensor]) -> Any:
        # vLLM scales the matrices B in place.
        own = {name: tensor.clone() if name.endswith(PARTS[1]) else tensor for name, tensor in named.items()}
        return library.adapter_model(self._manager, number, spec.rank, spec.alpha, own)

    def _hand_over(self, request: Any) -> Any:
        """Return the LoRAModel of the adapter that vLLM is to load. Replaces `WorkerLoRAManager._load_adapter`. Raises
        RuntimeError, which names the adapter, if it is not here, or if vLLM would remove another one for it."""
        kept = self._kept.get(request.lora_int_id)
        if kept is None or kept.model is None:
            why = "was never staged in this worker" if kept is None else "was removed from its slot while in use"
            raise RuntimeError(f"adapter {request.lora_name!r} (number {request.lora_int_id}) {why}")
        count = self._manager.lora_config.max_loras - library.spare_slots()
        if len(others := self._manager.list_adapters()) >= count:
            raise RuntimeError(f"adapter {request.lora_name!r}: all slots are taken, by the numbers {sorted(others)}")
        model, kept.model = kept.model, None
        return model
