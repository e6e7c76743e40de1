"""Makes the built-in base model, a tiny Qwen3 with a character tokenizer, and trains it on skills with digit strings.

Every text is `<letter><digits>=<answer>`. Digit strings of held-out prompts of the task `reverse` never occur.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging

from ...actors.rollout.prompt_sources import is_held_out
from ..config.config import WarmupConfig
from .made_tokenizers import DIGITS

SKILLS: dict[str, Callable[[str], str]] = {
    "c": lambda s: s,  # The skill copies the digits.
    "l": lambda s: s[1:] + s[:1],  # The skill rotates the digits to the left.
    "q": lambda s: s[-1:] + s[:-1],  # The skill rotates the digits to the right.
    "z": lambda s: s[::-1],  # The skill reverses the digits.
}
"""Skills of the base model: letter that a prompt starts with -> function from the digits to the answer."""

UNKNOWN = "r"
"""Letter of the task `reverse`. The corpus answers its prompts with any of the skills, so the model cannot learn what
the letter means."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the training corpus: prompts that start with one letter and are answered with one skill."""

    weight: float
    letter: str
    """Letter that the prompt starts with."""
    skill: str
    """Skill that computes the answers. It can differ from the skill that the letter stands for, as in noisy real-world
    text."""


DIGIT_SKILLS = (
    *(Share(1.0, skill, skill) for skill in SKILLS),
    *(Share(0.2 if skill == "z" else 0.3, UNKNOWN, skill) for skill in SKILLS),
)
"""The default corpus: prompts with the letters of the four skills, and prompts with the unknown letter. The latter are
answered with a random skill, which is the reversal in 18 % of the cases."""

SHORTEST, LONGEST = 1, 8
FALL_STEPS = 80
"""Number of steps at the end of the training during which the learning rate falls to 0."""
RECENT_STEPS = 20
"""Number of steps over which the loss is averaged."""


Model = Qwen3ForCausalLM | Qwen3MoeForCausalLM
"""Model that a run creates itself."""


def make_model(config: Mapping[str, Any], seed: int) -> Model:
    """Make a model with random weights drawn from `seed`, without changing the global generator.

    config: keys of a Qwen3Config, or, if its `model_type` is `qwen3_moe`, of a Qwen3MoeConfig.
    """
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.get("model_type") == "qwen3_moe":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))
        return Qwen3ForCausalLM(Qwen3Config(**config))


def corpus(seed: int, batch_size: int, shares: tuple[Share, ...] = DIGIT_SKILLS) -> Iterator[list[tuple[str, str]]]:
    """Yield endless batches of (prompt, answer). They depend only on the arguments."""
    rng = random.Random(seed)
    weights = [share.weight for share in shares]
    while True:
        batch = []
        for share in rng.choices(shares, weights, k=batch_size):
            digits = draw_digits(rng)
            batch.append((f"{share.letter}{digits}=", SKILLS[share.skill](digits)))
        yield batch


def draw_digits(rng: random.Random) -> str:
    """Draw a string of digits from a random alphabet of 2 to 10 digits. It is never the string of a prompt that the
    task `reverse` holds out for validation. Repeated digits make look-up by content ambiguous, so the model learns
    skills by position.
    """
    while True:
        alphabet = rng.sample(DIGITS, rng.randint(2, 10))
        digits = "".join(rng.choices(alphabet, k=rng.randint(SHORTEST, LONGEST)))
        if not is_held_out(f"{UNKNOWN}{digits}="):
            return digits


def warm_up(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    config: WarmupConfig,
    seed: int,
    show: Callable[[int, float], None],
) -> float:
    """Train the model on the answers until it knows the skills in SKILLS. Returns the mean loss of answers to prompts
    with their letters, over the last steps.

    Training ends FALL_STEPS steps after this loss, averaged over RECENT_STEPS steps, falls below `config.target_loss`,
    and at the latest after `config.steps` steps. The number of steps depends on the seed, not on the clock. `show` is
    called with the number and loss of each step.
    """
    torch.set_num_threads(1)  # More threads do not speed up such small matrices, and slow them down on busy cores.
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    batches = corpus(seed, config.batch_size)
    recent: deque[float] = deque(maxlen=RECENT_STEPS)
    last = config.steps
    model.train()
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / 25, (last - step + 1) / FALL_STEPS)
        batch = next(batches)
        loss, known = answer_loss(model, batch, tokenizer)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(known)
        show(step, known)
        if len(recent) == RECENT_STEPS and sum(recent) < config.target_loss * RECENT_STEPS:
            last = min(last, step + FALL_STEPS)
        if step == last:
            break
    model.eval()
    return sum(recent) / max(len(recent), 1)


def collate(
    batch: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokenize (prompt, answer) pairs. Returns right-padded ids, the attention mask, and a mask of the answer tokens
    with the end token, int64 `[N, L]` each."""
    prompts = tokenizer([prompt for prompt, _ in batch], add_special_tokens=False)["input_ids"]
    answers = tokenizer([answer + "<eos>" for _, answer in batch], add_special_tokens=False)["input_ids"]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids, attention, target = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        rest = [0] * (width - len(prompt) - len(answer))
        ids.append(prompt + answer + rest)
        attention.append([1] * (len(prompt) + len(answer)) + rest)
        target.append([0] * len(prompt) + [1] * len(answer) + rest)
    return torch.tensor(ids), torch.tensor(attention), torch.tensor(target)


def answer_loss(
    model: Model, batch: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, float]:
    """Return the mean cross-entropy of all answer tokens, and that of answers to prompts with a letter of SKILLS. The
    first is a tensor to train on, the second a number."""
    ids, attention, target = collate(batch, tokenizer)
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    mask = target[:, 1:]
    known = mask * torch.tensor([[prompt[0] != UNKNOWN] for prompt, _ in batch])
    value = (losses.detach() * known).sum() / known.sum().clamp(min=1)
    return (losses * mask).sum() / mask.sum(), value.item()
