"""Says which engines and train workers take pictures, and checks a configuration with pictures against that."""

from __future__ import annotations

from collections.abc import Iterator

ENGINES = ("hf", "scripted")
"""Values of `rollout.engine` whose engines take `SamplingParams.pictures`."""
BACKENDS = ("fsdp", "scripted")
"""Values of `trainer.backend` whose train workers read the column of pictures."""


def image_problems(
    *, enabled: bool, engine: str, backend: str, replays_routes: bool, has_teachers: bool
) -> Iterator[str]:
    """Yield one sentence for each setting that pictures do not fit. enabled: whether the run's prompts have pictures.
    engine, backend: `rollout.engine` and `trainer.backend`. replays_routes, has_teachers: whether the run has router
    replay, and teachers."""
    if not enabled:
        return
    given = "with data.images.enabled=true"
    for key, kind, kinds in (("rollout.engine", engine, ENGINES), ("trainer.backend", backend, BACKENDS)):
        if kind not in kinds:
            yield f"{key}: got {kind!r} {given}, expected {' or '.join(map(repr, kinds))}, because it takes no pictures"
    if replays_routes:
        yield f"router_replay.enabled: got true {given}, expected false, because pictures have no routes"
    if has_teachers:
        yield f"distillation.teachers: got some {given}, expected none, because teachers see no pictures"
