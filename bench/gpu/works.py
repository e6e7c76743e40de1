"""Names the works of `headrace bench gpu`: the model, the batch and the bounds within which its figures are right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .model_folder import FolderTask
from .shapes import SHAPES

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest values of the figures that tell whether a step computed the right thing."""

    mismatch_mean: float
    """Mean difference of the log-probs that engine and trainer give a sampled token, in nats."""
    mismatch_max: float
    """Largest such difference of a step, in nats."""
    grad_norm: float
    """Norm of the gradient before clipping."""


HALF = Bounds(mismatch_mean=0.02, mismatch_max=0.3, grad_norm=10.0)
"""Bounds for bfloat16. Correct runs had means of 0.005 to 0.007, a largest difference of 0.06, and norms of 0.40 to
0.45; weights of another version give means above 1."""
WIDE = replace(HALF, mismatch_mean=0.03)
"""Bounds for bfloat16 and 2 G parameters. Runs whose weights were equal byte for byte had means of up to 0.021, and a
largest difference of 0.12."""
EXACT = Bounds(mismatch_mean=1e-3, mismatch_max=1e-2, grad_norm=10.0)
"""Bounds for float32."""


@dataclass(frozen=True, slots=True)
class GrpoWork:
    """A whole GRPO run of some steps."""

    size: str
    """Size of the model, a key of `shapes.SHAPES`."""
    example: str
    """Name of the configuration in `examples/` that is run."""
    max_new_tokens: int
    mean_tokens: int
    """Mean number of tokens of a sample that no limit cuts."""
    prompt_tokens: tuple[int, int]
    """Smallest and largest number of tokens of a prompt."""
    prompts: int = 32
    """Number of prompts of a step."""
    group_size: int = 8
    """Number of samples of each prompt."""
    steps: int = 6
    """Number of steps of a run, unless the command line gives another."""
    trl_micro: int = 16
    """Number of rows of TRL's microbatches."""
    trl_memory: float = 0.4
    """Share of the GPU's memory that TRL's vLLM takes."""
    trl_recompute: bool = False
    """True if TRL recomputes activations (gradient checkpointing), because they do not fit."""
    half: Bounds = HALF
    """Bounds of a run in bfloat16."""

    def folder_task(self, dtype: str) -> FolderTask:
        """Return the contents of the model folder, with weights of `dtype`."""
        return FolderTask(SHAPES[self.size], dtype, self.mean_tokens, self.prompt_tokens, num_prompts=2048)


_LONG = (1024, 672, (64, 281))
GRPO_WORKS = {
    "grpo-tiny": GrpoWork("tiny", "gpu-0.6b.yaml", 32, 24, (16, 48), prompts=4, group_size=4, steps=3),
    "grpo-0.6b": GrpoWork("0.6b", "gpu-0.6b.yaml", *_LONG),
    "grpo-1.7b": GrpoWork("1.7b", "gpu-1.7b.yaml", *_LONG, trl_micro=8, trl_memory=0.35),
    "grpo-4b": GrpoWork("4b", "gpu-4b.yaml", *_LONG, trl_micro=4, trl_memory=0.25, trl_recompute=True),
}
"""Name of a work -> a run of that work. `grpo-tiny` also runs without a GPU, to try out the command."""
_SHORT = (192, 128, (64, 192))
POOL_WORKS = {
    "pool-tiny": GrpoWork("tiny", "gpu-0.6b.yaml", 32, 24, (16, 48), prompts=2, group_size=4, steps=10),
    "pool-0.6b": GrpoWork("0.6b", "gpu-0.6b.yaml", *_SHORT, prompts=8, steps=20),
    "pool-2g": GrpoWork("2g", "gpu-1.7b.yaml", *_SHORT, prompts=8, steps=10, half=WIDE),
}
"""Name of a work -> the run of each of two tenants of a pool of two GPUs. `pool-tiny` also runs without a GPU."""
SWITCH_WORKS = {"switch-2g": ("2B", "2g")}
"""Name of a work that times switches of roles -> the model's size for the engine, a key of `bench.weights`, and for the
trainer, a key of `shapes.SHAPES`. Both have the same dimensions."""


@dataclass(frozen=True, slots=True)
class TrainWork:
    """Train steps alone, on made-up rows."""

    size: str
    """Size of the model, a key of `shapes.SHAPES`."""
    layers: int
    """Number of layers of the model, of which the shape may have more."""
    tokens: int = 16384
    """Largest number of tokens of a microbatch."""
    micros: int = 2
    """Number of microbatches of a step."""
    steps: int = 6
    """Number of steps, the first two of which are not counted."""


TRAIN_WORKS = {
    "train-tiny": TrainWork("tiny", 2, tokens=256, steps=3),
    "train-tiny-moe": TrainWork("tiny-moe", 2, tokens=256, steps=3),
    "train-0.6b": TrainWork("0.6b", 28),
    "train-1.7b": TrainWork("1.7b", 28),
    "train-4b": TrainWork("4b", 36),
    "train-moe": TrainWork("30b-a3b", 4),
}
"""Name of a work -> train steps alone. The works `train-tiny*` also run without a GPU. `train-moe` has as many layers
of Qwen3-30B-A3B as fit into 80 GiB with their optimizer; `--layers` sets another number."""


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Samples of engines alone, on made-up prompts."""

    size: str
    """Size of the model, a key of `shapes.SHAPES`."""
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
WORKS = (*GRPO_WORKS, *POOL_WORKS, *SWITCH_WORKS, *TRAIN_WORKS, *ENGINE_WORKS)
