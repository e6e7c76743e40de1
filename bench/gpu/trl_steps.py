"""Times steps of TRL's GRPOTrainer with vLLM in the same process, on the model and prompts of `headrace bench gpu`.

    python -m headrace.bench.gpu.trl_steps TASK RESULT

TASK is a JSON file with the fields of `baseline.TrlTask`, and RESULT the JSON file that it writes. It runs in a process
of its own, because TRL, vLLM and their settings must not meet those of Headrace.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("flashinfer") is None:  # vLLM would fail at its first sample, for it does not look
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # not a dependency of Headrace


class Clock(TrainerCallback):
    """Callback of TRL's trainer that records the wall seconds of each step, and TRL's own figures of it.

    They are written after each step, so that a process that is ended early leaves them.
    """

    def __init__(self, path: Path) -> None:
        """path: JSON file with the figures, which `baseline.read_trl` reads."""
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
        beside.replace(self._path)  # whole at all times, as it is read meanwhile


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Return the same numbers as `rewards.spread`."""
    return [(sum(map(ord, completion[:40])) % 11) / 10.0 for completion in completions]


def trl_config(task: dict[str, Any], folder: str) -> GRPOConfig:
    """Return TRL's fastest settings: no copy of the policy's log-probs before the step, no correction, no sleep. The
    correction is that of importance. folder: where TRL may write."""
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
        learning_rate=1e-6,
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


def main(task_path: str, result_path: str) -> None:
    task = json.loads(Path(task_path).read_text())
    lines = (Path(task["model"]) / "prompts.jsonl").read_text().splitlines()
    clock = Clock(Path(result_path))
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=reward,
        args=trl_config(task, f"{result_path}.folder"),
        train_dataset=Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines]),
        callbacks=[clock],
    )
    trainer.train()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process alive


if __name__ == "__main__":
    main(*sys.argv[1:])
