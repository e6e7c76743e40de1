"""Says which engines and train workers take pictures, and checks a configuration with pictures against that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ENGINES = ("hf", "scripted", "vllm")
"""Values of `rollout.engine` whose engines take `SamplingParams.pictures`."""
BACKENDS = ("fsdp", "scripted")
"""Values of `trainer.backend` whose train workers read the column of pictures."""


def image_problems(
    *, enabled: bool, engine: str, backend: str, cp: int, replays_routes: bool, engine_teachers: Sequence[str]
) -> Iterator[str]:
    """Yield one sentence for each setting that pictures do not fit. enabled: whether the run's prompts have pictures.
    engine, backend, cp: `rollout.engine`, `trainer.backend` and `trainer.cp`. replays_routes: whether the run has
    router replay. engine_teachers: names of the teachers that have engines."""
    if not enabled:
        return
    given = "with data.images.enabled=true"
    for key, kind, kinds in (("rollout.engine", engine, ENGINES), ("trainer.backend", backend, BACKENDS)):
        if kind not in kinds:
            yield f"{key}: got {kind!r} {given}, expected {' or '.join(map(repr, kinds))}, because it takes no pictures"
    if replays_routes:
        yield f"router_replay.enabled: got true {given}, expected false, because pictures have no routes"
    if cp > 1:
        yield f"trainer.cp: got {cp} {given}, expected 1, because a part of a row has not all of its pictures"
    if engine_teachers:
        yield (
            f"distillation.teachers with where='engine' ({', '.join(engine_teachers)}) {given}, expected "
            "where='train', because teachers in engines get no pictures"
        )
