"""Times steps of TRL's GRPOTrainer on the model and prompts of a Headrace run, so that the two can be compared.

    python -m headrace.bench.peers.trl_step TASK RESULT
    python bench/peers/trl_step.py RUN_DIR/base_model

`headrace bench gpu --baseline trl` runs the first command, with vLLM in the same process. TASK is a JSON file with the
fields of `gpu.trl.TrlTask`, and RESULT is the JSON file that the command writes. The second command is run by hand on
the same quiet machine as `headrace train`. RUN_DIR is the folder of a quickstart run; the command makes steps of 256
samples with the model and task of that run. Both commands need `pip install trl==1.16.0`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("flashinfer") is None:  # vLLM does not check this and would fail at its first sample.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # not a dependency of Headrace

QUICKSTART: dict[str, Any] = {
    "steps": 40, "prompts": 32, "group_size": 8, "max_new_tokens": 10, "micro": 256, "recompute": False, "vllm": False,
}  # fmt: skip
"""Settings of the quickstart, with the fields of TASK as keys."""
WARM = 10
"""Number of the quickstart's first steps that are not counted."""


class Clock(TrainerCallback):
    """Callback of TRL's trainer that records the wall seconds of each step, and TRL's own figures of the step.

    They are written after each step, so that a process that ends early leaves them.
    """

    def __init__(self, path: Path) -> None:
        """path: JSON file with the figures, which `gpu.trl.read_trl` reads."""
        self._path = path
        self.started = 0.0
        self.seconds: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)
        print(f"step {len(self.seconds)}: {self.seconds[-1]:.2f} s", flush=True)
        self._write()

    def on_log(self, *_: object, logs: dict[str, float] | None = None, **__: object) -> None:
        self.logs.append({key: value for key, value in (logs or {}).items() if isinstance(value, (int, float))})
        self._write()

    def _write(self) -> None:
        peak_gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps({"seconds": self.seconds, "peak_gib": peak_gib, "logs": self.logs}))
        beside.replace(self._path)  # Because of the rename, readers always find a whole file.


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Return the same rewards as `gpu.works.spread`, for TRL."""
    return [(sum(map(ord, completion[:40])) % 11) / 10.0 for completion in completions]


def trl_config(task: dict[str, Any], folder: str, learning_rate: float = 1e-6) -> GRPOConfig:
    """Return TRL's fastest settings: no copy of the policy's log-probs, no importance correction and no sleep. folder:
    where TRL may write."""
    rows = task["prompts"] * task["group_size"]
    engine: dict[str, Any] = {}
    if task["vllm"]:
        engine = {
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": task["memory"],
            "vllm_max_model_length": task["max_prompt_tokens"] + task["max_new_tokens"],
            "vllm_importance_sampling_correction": False,
        }
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=task["micro"],
        gradient_accumulation_steps=rows // task["micro"],
        num_generations=task["group_size"],
        max_completion_length=task["max_new_tokens"],
        max_steps=task["steps"],
        learning_rate=learning_rate,
        beta=0.0,
        temperature=1.0,
        bf16=task["vllm"],
        use_cpu=not task["vllm"],
        gradient_checkpointing=task["recompute"],
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        use_vllm=task["vllm"],
        model_init_kwargs={"dtype": "float32"},
        disable_tqdm=True,
        **engine,
    )


def train(model: str, rewards: Any, config: GRPOConfig, prompts: list[str], clock: Clock) -> None:
    """Train `model` on `prompts`, and record the steps in `clock`."""
    rows = Dataset.from_list([{"prompt": text} for text in prompts])
    GRPOTrainer(model=model, reward_funcs=rewards, args=config, train_dataset=rows, callbacks=[clock]).train()


def run_task(task_path: str, result_path: str) -> None:
    """Make the steps of a TASK, write RESULT, and end this process."""
    task = json.loads(Path(task_path).read_text())
    lines = (Path(task["model"]) / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    train(task["model"], reward, trl_config(task, f"{result_path}.folder"), prompts, Clock(Path(result_path)))
    sys.stdout.flush()
    os._exit(0)  # A normal exit would wait for vLLM's threads forever.


def run_quickstart(model: str) -> None:
    """Make steps on the quickstart's model and task, and print their median seconds."""
    from headrace.actors.rewards.builtin import per_position
    from headrace.actors.rollout.prompt_sources import TaskSource
    from headrace.actors.rollout.prompts import PromptStream

    torch.set_num_threads(2)
    stream = PromptStream(TaskSource("reverse", held_out=False), seed=0)
    rows = [stream[position] for position in range(QUICKSTART["prompts"] * QUICKSTART["steps"])]
    of_text = {prompt.text: prompt for prompt in rows}

    def score(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        return [per_position(of_text[p], c, "stop") for p, c in zip(prompts, completions, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(Path(folder, "result.json"))
        train(model, score, trl_config(QUICKSTART, folder, learning_rate=2e-3), [one.text for one in rows], clock)
    counted = clock.seconds[WARM:]
    print(f"TRL: median {statistics.median(counted):.3f} s a step of 256 samples ({len(counted)} steps)")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        warnings.simplefilter("ignore")
        run_quickstart(sys.argv[1])
    else:
        run_task(*sys.argv[1:])
