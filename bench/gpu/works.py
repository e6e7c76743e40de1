"""Defines the works of `headrace bench gpu` (a model, a batch and bounds for the figures) and the layouts of GPUs.

    colocated    every GPU has an engine and a train rank
    separate     the first half of the GPUs has the train ranks, the other half the engines
    tensor       one engine and one replica, both split over every GPU (tensor parallel)
    one-engine   a train rank on every GPU, one engine on the first

A layout is written NAME-N for N GPUs, or NAME for all GPUs. It becomes keys of a run's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...actors.protocols import Prompt
from ...trainers.errors import UserError
from ..models import SHAPES, FolderTask
from ..vision_models import picture_tokens

LAYOUTS = ("colocated", "separate", "tensor", "experts", "one-engine")
CPU = "cpu"
"""Name of the only layout of a machine without a GPU."""

NUM_PICTURES = 512
"""Number of prompts, each with a picture of its own, in the folder of a work with pictures."""
ONE_OF_EACH = {"rollout.num_engines": 1, "rollout.tp": 1, "trainer.dp": 1, "trainer.tp": 1, "trainer.ep": 1}
"""Numbers of engines and ranks that replace an example's own, where a layout does not say others."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of the engines and the train ranks of a run."""

    label: str
    """Name of the layout as the user wrote it. It is part of the summary's keys."""
    name: str
    """One of LAYOUTS, or CPU."""
    gpus: int
    """Number of GPUs that the run uses; 0 on a machine without one."""

    @property
    def shared(self) -> bool:
        """True if engines and train ranks share GPUs."""
        return self.name != "separate"

    def overrides(self) -> list[str]:
        """Return the keys of the run's configuration, as `key=value`."""
        if self.name == CPU:
            return [f"{key}={value}" for key, value in ONE_OF_EACH.items()]
        if self.name == "one-engine":
            everywhere = ",".join(map(str, range(self.gpus)))
            placed = [f"resources.trainer_gpus=[{everywhere}]", "resources.rollout_gpus=[0]"]
        else:
            placed = [f"resources.layout={'colocated' if self.shared else 'separate'}"]
        return [*placed, *(f"{key}={value}" for key, value in (ONE_OF_EACH | self._sizes()).items())]

    def _sizes(self) -> dict[str, int]:
        if self.name == "tensor":
            return {"rollout.tp": self.gpus, "trainer.tp": self.gpus}
        if self.name == "experts":  # each engine has two GPUs, so that half of the weights leave room for its cache
            tensor = 2 if self.gpus % 2 == 0 else 1
            engines = {"rollout.num_engines": self.gpus // tensor, "rollout.tp": tensor}
            return engines | {"trainer.dp": self.gpus, "trainer.ep": self.gpus}
        if self.name == "one-engine":
            return {"trainer.dp": self.gpus}
        ranks = self.gpus if self.shared else self.gpus // 2
        return {"rollout.num_engines": ranks, "trainer.dp": ranks}


def parse_layout(text: str, gpus: int) -> Layout:
    """Return the layout that `text` names on a machine with `gpus` GPUs. Raises UserError for an unknown name, and for
    a number of GPUs that the machine does not have or the layout cannot use."""
    if gpus == 0:
        raise UserError(f"--layout: got {text!r} on a machine without a GPU, expected no layout")
    name, dash, number = text.rpartition("-")
    if not (dash and number.isdecimal()):
        name, number = text, str(gpus)
    if name not in LAYOUTS:
        raise UserError(
            f"--layout: got {text!r}, expected some of {', '.join(LAYOUTS)}, each alone or with -N for N GPUs"
        )
    used = int(number)
    if not 1 <= used <= gpus:
        raise UserError(f"--layout: got {text!r}, expected 1 to {gpus} GPUs, because this machine has {gpus}")
    if name == "separate" and (used < 2 or used % 2):
        raise UserError(f"--layout: got {text!r} with {used} GPUs, expected an even number for `separate`")
    return Layout(text, name, used)


def spread(prompt: Prompt, response: str, finish_reason: str) -> float:
    """Return a number in [0, 1] that depends on the first characters of the response. The values of a group's samples
    therefore usually differ, so that a step has a gradient. The function takes almost no time, so that it does not
    distort the measurement."""
    return (sum(map(ord, response[:40])) % 11) / 10.0


EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of the figures by which a wrong computation is found."""

    mismatch_mean: float
    """Mean difference between the engine's and the trainer's log-prob of a sampled token, in nats."""
    mismatch_max: float
    """Largest such difference of a step, in nats."""
    grad_norm: float
    """Norm of the gradient before clipping."""


HALF = Bounds(mismatch_mean=0.02, mismatch_max=0.3, grad_norm=10.0)
"""Bounds for bfloat16. Correct runs had means of 0.005 to 0.007, a largest difference of 0.06, and norms of 0.40 to
0.45; weights of another version give means above 1."""
WIDE = Bounds(mismatch_mean=0.05, mismatch_max=0.3, grad_norm=10.0)
"""Bounds for bfloat16 and the 36 layers of `grpo-4b`, where rounding adds up. Correct runs had means of 0.02 with data
parallelism and 0.028 with two tensor-parallel train ranks, and a largest difference of 0.2."""
EXACT = Bounds(mismatch_mean=1e-3, mismatch_max=1e-2, grad_norm=10.0)
"""Bounds for float32."""


@dataclass(frozen=True, slots=True)
class GrpoWork:
    """A work that makes whole GRPO runs of a few steps."""

    size: str
    """Size of the model, a key of `models.SHAPES`."""
    example: str
    """Name of the configuration in `examples/` that is run."""
    max_new_tokens: int
    mean_tokens: int
    """Mean number of tokens of a sample, if no limit cut it."""
    prompt_tokens: tuple[int, int]
    """Smallest and largest number of tokens of a prompt."""
    prompts: int = 32
    """Number of prompts of a step."""
    group_size: int = 8
    """Number of samples of each prompt."""
    steps: int = 6
    """Number of steps of a run. The command line can give another number."""
    trl_micro: int = 16
    """Number of rows of TRL's microbatches."""
    trl_memory: float = 0.4
    """Share of the GPU's memory that TRL's vLLM takes."""
    trl_recompute: bool = False
    """True if TRL must recompute activations (gradient checkpointing) because they do not fit into memory."""
    half: Bounds = HALF
    """Bounds of a run in bfloat16."""
    layers: int = 0
    """Number of layers of the model; 0 means that of the shape."""
    picture: int = 0
    """Width and height in pixels of the picture of each prompt; 0 for prompts without pictures."""

    @property
    def max_prompt_tokens(self) -> int:
        """Largest number of tokens of a prompt, its picture included."""
        return self.prompt_tokens[1] + picture_tokens(self.picture)

    def folder_task(self, dtype: str) -> FolderTask:
        """Return the contents of the model folder, with weights of `dtype`."""
        shape = SHAPES[self.size]
        shape = replace(shape, layers=self.layers or shape.layers)
        count = NUM_PICTURES if self.picture else 2048
        return FolderTask(shape, dtype, self.mean_tokens, self.prompt_tokens, num_prompts=count, picture=self.picture)


_LONG = (1024, 672, (64, 281))
GRPO_WORKS = {
    "grpo-tiny": GrpoWork("tiny", "gpu-0.6b.yaml", 32, 24, (16, 48), prompts=4, group_size=4, steps=3),
    "grpo-tiny-moe": GrpoWork("tiny-moe", "gpu-30b-a3b.yaml", 32, 24, (16, 48), prompts=4, group_size=4, steps=3),
    "grpo-tiny-vl": GrpoWork(
        "tiny-vl", "gpu-vl-3b.yaml", 32, 24, (16, 48), prompts=4, group_size=4, steps=3, picture=112
    ),
    "grpo-0.6b": GrpoWork("0.6b", "gpu-0.6b.yaml", *_LONG),
    "grpo-1.7b": GrpoWork("1.7b", "gpu-1.7b.yaml", *_LONG, trl_micro=8, trl_memory=0.35),
    "grpo-4b": GrpoWork("4b", "gpu-4b.yaml", *_LONG, trl_micro=4, trl_memory=0.25, trl_recompute=True, half=WIDE),
    "grpo-vl-3b": GrpoWork("vl-3b", "gpu-vl-3b.yaml", 512, 336, (32, 96), prompts=64, half=WIDE, picture=640),
    "grpo-30b-a3b": GrpoWork("30b-a3b", "gpu-30b-a3b.yaml", *_LONG, prompts=64, trl_memory=0.25, half=WIDE),
}
"""Name of a work -> its whole runs."""

TINY = ("grpo-tiny", "grpo-tiny-moe", "grpo-tiny-vl")
"""Works whose whole runs also run without a GPU."""


@dataclass(frozen=True, slots=True)
class TrainWork:
    """A work that makes train steps alone, on made-up rows."""

    size: str
    """Size of the model, a key of `models.SHAPES`."""
    layers: int
    """Number of layers of the model. It can be less than that of the shape."""
    tokens: int = 16384
    """Largest number of tokens of a microbatch."""
    micros: int = 2
    """Number of microbatches of a step."""
    steps: int = 6
    """Number of steps. The first two are not counted."""


TRAIN_WORKS = {
    "train-tiny": TrainWork("tiny", 2, tokens=256, steps=3),
    "train-tiny-moe": TrainWork("tiny-moe", 2, tokens=256, steps=3),
    "train-135m": TrainWork("135m", 30, tokens=32768),
    "train-0.6b": TrainWork("0.6b", 28),
    "train-1.7b": TrainWork("1.7b", 28),
    "train-4b": TrainWork("4b", 36),
    "train-moe": TrainWork("30b-a3b", 4),
}
"""Name of a work -> its train steps. The works `train-tiny*` also run without a GPU. `train-moe` has as many layers
of Qwen3-30B-A3B as fit into 80 GiB with their optimizer; `--layers` sets another number."""
WORKS = (*GRPO_WORKS, *TRAIN_WORKS)
