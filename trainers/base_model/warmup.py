"""The built-in base model: a tiny Qwen3 with a character tokenizer, warmed up on skills with strings of digits.

Every text is `<letter><digits>=<answer>`. Digits whose `reverse` prompt is held out never occur.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from ...actors.rollout.tasks import is_held_out
from ..config.config import WarmupConfig

DIGITS = "0123456789"
SYMBOLS = DIGITS + "=" + "abcdefghijklmnopqrstuvwxyz"
SPECIALS = ("<pad>", "<bos>", "<eos>")

SKILLS: dict[str, Callable[[str], str]] = {
    "c": lambda s: s,  # copy
    "l": lambda s: s[1:] + s[:1],  # rotate left
    "q": lambda s: s[-1:] + s[:-1],  # rotate right
    "z": lambda s: s[::-1],  # backwards
}
"""What the base model can do with a string when it is asked by letter."""

UNKNOWN = "r"
"""The letter of the task `reverse`: in the corpus it stands before answers of any kind, so it asks for nothing."""


@dataclass(frozen=True, slots=True)
class Share:
    """One ingredient of the corpus."""

    weight: float
    letter: str
    """Of the prompt."""
    skill: str
    """What the answer does: not what the letter asks for, as in a corpus from the wild."""


DIGIT_SKILLS = (
    *(Share(1.0, skill, skill) for skill in SKILLS),
    *(Share(0.2 if skill == "z" else 0.3, UNKNOWN, skill) for skill in SKILLS),
)
"""Four skills by letter, and prompts of the unknown letter answered by one of them at random, backwards in 18 %."""

SHORTEST, LONGEST = 1, 8
FALL_STEPS = 80
"""Steps in which the learning rate falls to 0 at the end."""
RECENT_STEPS = 20
"""Steps over which the loss is averaged."""


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
        return Qwen3ForCausalLM(Qwen3Config(**config))


def corpus(seed: int, batch_size: int, shares: tuple[Share, ...] = DIGIT_SKILLS) -> Iterator[list[tuple[str, str]]]:
    """Endless batches of (prompt, answer), a pure function of the arguments."""
    rng = random.Random(seed)
    weights = [share.weight for share in shares]
    while True:
        batch = []
        for share in rng.choices(shares, weights, k=batch_size):
            digits = draw_digits(rng)
            batch.append((f"{share.letter}{digits}=", SKILLS[share.skill](digits)))
        yield batch


def draw_digits(rng: random.Random) -> str:
    """Digits over a random alphabet of 2 to 10 of them: repeated ones make look-up by content ambiguous, so that skills
    are learned by position."""
    while True:
        alphabet = rng.sample(DIGITS, rng.randint(2, 10))
        digits = "".join(rng.choices(alphabet, k=rng.randint(SHORTEST, LONGEST)))
        if not is_held_out(f"{UNKNOWN}{digits}="):
            return digits


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: WarmupConfig,
    seed: int,
    show: Callable[[int, float], None],
) -> float:
    """Supervised training on the answers until the skills asked by letter are learned; returns their loss.

    Ends FALL_STEPS after their loss, averaged over RECENT_STEPS, is under `config.target_loss`, and at `config.steps`
    at the latest: how many steps depends on the seed, not on the clock. `show` gets step and loss of each.
    """
    torch.set_num_threads(1)  # matrices this small gain nothing from more, and lose much when the cores are busy
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
    model: Qwen3ForCausalLM, batch: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, float]:
    """Mean cross-entropy of the answer tokens: of all, and of those whose letter is known."""
    ids, attention, target = collate(batch, tokenizer)
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    mask = target[:, 1:]
    known = mask * torch.tensor([[prompt[0] != UNKNOWN] for prompt, _ in batch])
    value = (losses.detach() * known).sum() / known.sum().clamp(min=1)
    return (losses * mask).sum() / mask.sum(), value.item()
