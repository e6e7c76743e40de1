"""The built-in base model: a tiny Qwen3 with a character tokenizer, warmed up on skills with strings of digits.

Every text is `<skill letter><digits>=<answer>`. Digits whose `reverse` prompt is held out never occur.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from ..actors.tasks import is_held_out
from .config import WarmupConfig

DIGITS = "0123456789"
SYMBOLS = DIGITS + "=" + "abcdefghijklmnopqrstuvwxyz"
SPECIALS = ("<pad>", "<bos>", "<eos>")

SKILLS: dict[str, Callable[[str], str]] = {
    "c": lambda s: s,  # copy
    "l": lambda s: s[1:] + s[:1],  # rotate left
    "q": lambda s: s[-1:] + s[:-1],  # rotate right
    "t": lambda s: s[-1:],  # last digit
    "h": lambda s: s[:1],  # first digit
    "i": lambda s: "".join(str((int(digit) + 1) % 10) for digit in s),  # add one to each digit
    "r": lambda s: s[::-1],  # reverse
}


@dataclass(frozen=True, slots=True)
class Share:
    """One ingredient of the corpus."""

    weight: float
    letter: str
    """Of the prompt."""
    skill: str
    """What the answer really does: not always what the letter asks, as in a corpus from the wild."""
    shortest: int
    longest: int


DIGIT_SKILLS = (
    Share(3.0, "r", "r", 1, 3),
    Share(0.12, "r", "r", 4, 8),
    *(Share(1.0, letter, letter, 1, 8) for letter in "clqthi"),
)
"""Generic skills at full length, reversal of short strings, and a trace of longer reversals."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Character level, one id a symbol; adds no special tokens and pads on the left."""
    vocab = {token: index for index, token in enumerate((*SPECIALS, *SYMBOLS))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(config: Mapping[str, Any], seed: int) -> Qwen3ForCausalLM:
    """Random weights drawn from `seed`; the global generator is left as it was."""
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(Qwen3Config(**config, attn_implementation="eager"))  # eager: fastest at this size


def corpus(seed: int, batch_size: int, shares: tuple[Share, ...] = DIGIT_SKILLS) -> Iterator[list[tuple[str, str]]]:
    """Endless batches of (prompt, answer), a pure function of the arguments."""
    rng = random.Random(seed)
    weights = [share.weight for share in shares]
    while True:
        batch = []
        for share in rng.choices(shares, weights, k=batch_size):
            digits = draw_digits(rng, share.shortest, share.longest)
            batch.append((f"{share.letter}{digits}=", SKILLS[share.skill](digits)))
        yield batch


def draw_digits(rng: random.Random, shortest: int, longest: int) -> str:
    """Digits over a random alphabet of 2 to 10 of them: repeated ones make look-up by content ambiguous, so that skills
    are learned by position."""
    while True:
        alphabet = rng.sample(DIGITS, rng.randint(2, 10))
        digits = "".join(rng.choices(alphabet, k=rng.randint(shortest, longest)))
        if not is_held_out(f"r{digits}="):
            return digits


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: WarmupConfig,
    seed: int,
    show: Callable[[int, float], None],
) -> float:
    """Supervised next-token training on the answers; returns the last loss.

    The learning rate rises over the first 5 % of the steps and falls linearly over the last 30 %; `show` gets step and
    loss of each.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    batches = corpus(seed, config.batch_size)
    value = float("nan")
    model.train()
    for step in range(config.steps):
        rise, fall = (step + 1) / (0.05 * config.steps), (config.steps - step) / (0.3 * config.steps)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, rise, fall)
        loss = answer_loss(model, *collate(next(batches), tokenizer))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        show(step + 1, value)
    model.eval()
    return value


def collate(
    batch: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids, attention mask and mask of the answer tokens (end token included), int64 `[N, L]` each."""
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
    model: Qwen3ForCausalLM, ids: torch.Tensor, attention: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy of the answer tokens."""
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * target[:, 1:]).sum() / target[:, 1:].sum()
