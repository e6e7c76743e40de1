"""Makes the model folder of a benchmark without any download: random weights, a byte-level tokenizer and prompts.

The lengths of the samples are drawn, as they are in training. A model with random weights gives all tokens about the
same probability, so that a sample ends after a geometric number of tokens when many tokens, spread over the vocabulary,
are end tokens.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from ...trainers.base_model.made_tokenizers import byte_level_tokenizer
from .shapes import Shape

PROMPTS = "prompts.jsonl"
"""Name of the file of prompts in the model folder."""
_COMPLETE = "complete"
_MAKE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class FolderTask:
    """Contents of a model folder."""

    shape: Shape
    dtype: str
    """Name of the dtype of the weights on disk."""
    mean_tokens: int
    """Mean number of tokens of a sample that no limit cuts."""
    prompt_tokens: tuple[int, int]
    """Smallest and largest number of tokens of a prompt."""
    num_prompts: int
    seed: int = 0

    @property
    def num_ends(self) -> int:
        """Number of end tokens."""
        return max(1, round(self.shape.vocabulary / self.mean_tokens))


def make_folder(folder: Path, task: FolderTask, device: str) -> None:
    """Write the model folder in a process of its own, which has returned the memory of `device` when this returns. A
    folder that is complete is left as it is.

    Raises RuntimeError when the process fails, or takes longer than ten minutes.
    """
    if (folder / _COMPLETE).exists():
        return
    process = multiprocessing.get_context("spawn").Process(target=write_folder, args=(folder, task, device))
    process.start()
    try:
        process.join(_MAKE_TIMEOUT_S)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{folder}: the model could not be made, its process ended with code {process.exitcode}")


def write_folder(folder: Path, task: FolderTask, device: str) -> None:
    """Write weights, configuration, tokenizer and prompts into `folder`. device: where the weights are drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer(task.shape.tokens)
    tokenizer.save_pretrained(folder)
    lines = [json.dumps({"prompt": text}) for text in draw_prompts(tokenizer, task)]
    (folder / PROMPTS).write_text("".join(line + "\n" for line in lines))
    _write_model(folder, task, device)
    (folder / _COMPLETE).touch()


def end_tokens(task: FolderTask) -> list[int]:
    """Return the ids of the end tokens, ascending. They are `num_ends` - 1 at equal distances, and the tokenizer's own
    end token, which is its last."""
    spacing = task.shape.tokens / task.num_ends
    return [*(int(spacing * number) for number in range(1, task.num_ends)), task.shape.tokens - 1]


def draw_prompts(tokenizer: PreTrainedTokenizerFast, task: FolderTask) -> list[str]:
    """Return texts of random words whose numbers of tokens are drawn evenly between the task's bounds."""
    rng = random.Random(task.seed)
    words = [" " + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(2000)]
    # Words begin with a space, at which the tokenizer splits: the tokens of a text are those of its words.
    sizes = [len(ids) for ids in tokenizer(words)["input_ids"]]
    longest, (least, most) = max(sizes), task.prompt_tokens
    prompts = []
    for _ in range(task.num_prompts):
        left, picked = rng.randint(min(least + longest, most), most), []
        while left >= longest:
            number = rng.randrange(len(words))
            picked.append(words[number])
            left -= sizes[number]
        prompts.append("".join(picked))
    return prompts


def _write_model(folder: Path, task: FolderTask, device: str) -> None:
    end = task.shape.tokens - 1
    family = Qwen3MoeConfig if task.shape.experts else Qwen3Config
    config = family(
        **task.shape.options(), pad_token_id=end - 2, bos_token_id=end - 1, eos_token_id=end, dtype=task.dtype
    )
    disable_progress_bar()
    torch.manual_seed(task.seed)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, task.dtype))
    model.generation_config.eos_token_id = end_tokens(task)
    model.generation_config.pad_token_id = end - 2
    model.save_pretrained(folder)
