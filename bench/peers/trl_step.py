"""Times the step of another library on the quickstart's model and task: TRL's GRPOTrainer with 256 samples.

Run it by hand beside `headrace train` on the same quiet machine, to compare step times: `pip install trl`, then
`python bench/peers/trl_step.py RUN_DIR/base_model`, where RUN_DIR is the folder of a quickstart run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # not a dependency of Headrace

from headrace.actors.rewards.builtin import per_position
from headrace.actors.rollout.prompt_sources import TaskSource
from headrace.actors.rollout.prompts import PromptStream

STEPS, WARM = 40, 10


class Clock(TrainerCallback):
    """Callback of TRL's trainer that records the wall seconds of each step."""

    def __init__(self) -> None:
        self.started = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def main(model: str) -> None:
    torch.set_num_threads(2)
    prompts = PromptStream(TaskSource("reverse", held_out=False), seed=0)
    rows = [prompts[position] for position in range(32 * STEPS)]
    of_text = {prompt.text: prompt for prompt in rows}

    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        return [per_position(of_text[p], c, "stop") for p, c in zip(prompts, completions, strict=True)]

    clock = Clock()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=10,
        max_steps=STEPS,
        learning_rate=2e-3,
        beta=0.0,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=STEPS,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in rows]),
        callbacks=[clock],
    )
    trainer.train()
    print(f"TRL: median {statistics.median(clock.seconds[WARM:]):.3f} s a step of 256 samples ({STEPS - WARM} steps)")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
