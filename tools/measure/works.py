"""Names the works of `tools/measure/gpu.py`: a model, a batch and bounds of right figures for each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.bench.gpu.works import HALF, GrpoWork

WIDE = replace(HALF, mismatch_mean=0.03)
"""Bounds for bfloat16 and 2 G parameters. Runs whose weights were equal byte for byte had means of up to 0.021, and a
largest difference of 0.12."""
_SHORT = (192, 128, (64, 192))
POOL_WORKS = {
    "pool-tiny": GrpoWork("tiny", "gpu-0.6b.yaml", 32, 24, (16, 48), prompts=2, group_size=4, steps=10),
    "pool-0.6b": GrpoWork("0.6b", "gpu-0.6b.yaml", *_SHORT, prompts=8, steps=20),
    "pool-2g": GrpoWork("2g", "gpu-1.7b.yaml", *_SHORT, prompts=8, steps=10, half=WIDE),
}
"""Name of a work -> the run of each of two tenants of a pool of two GPUs. `pool-tiny` also runs without a GPU."""
SWITCH_WORKS = {"switch-2g": ("2B", "2g")}
"""Name of a work that times switches of roles -> the model's size for the engine, a key of `bench.weights`, and for the
trainer, a key of `models.SHAPES`. Both have the same dimensions."""


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Samples of engines alone, on made-up prompts."""

    size: str
    """Size of the model, a key of `models.SHAPES`."""
    max_new_tokens: int
    """Number of tokens of a sample."""
    prompt_tokens: tuple[int, int]
    """Smallest and largest number of tokens of a prompt."""
    prompts: int = 32
    """Number of prompts of a round."""
    group_size: int = 8
    """Number of samples of each prompt."""
    layers: int | None = None
    """Number of layers of the model; None means all of its shape."""
    example: str = "gpu-0.6b.yaml"
    """Name of the configuration in `examples/` that engine and trainer take their settings from."""


LOGPROB_WORKS = {
    "engine-logprobs-tiny": EngineWork("tiny", 32, (16, 48), prompts=4, group_size=4),
    "engine-logprobs": EngineWork("0.6b", 512, (64, 281)),
}
"""Name of a work that times ways to get log-probs out of an engine -> its samples."""
ROUTE_WORKS = {
    "engine-routes-tiny": EngineWork("tiny-moe", 32, (16, 48), prompts=4, group_size=4),
    "engine-routes": EngineWork("30b-a3b", 256, (64, 281), layers=8),
}
"""Name of a work that times an engine with routes beside one without -> its samples. `engine-routes` has 8 layers of
Qwen3-30B-A3B, which two engines on a GPU of 80 GB hold with ease. With 40, on one of 141 GB, the GPU sets the speed and
not the processor, and rounds differ less."""
ENGINE_WORKS = {**LOGPROB_WORKS, **ROUTE_WORKS}
"""Name of a work that times engines -> its samples. The works `*-tiny` also run without a GPU."""
WORKS = (*POOL_WORKS, *SWITCH_WORKS, *ENGINE_WORKS)
