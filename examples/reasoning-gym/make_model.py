"""Makes a small model that has read many sums, right and wrong, so that RL has something to begin with on a CPU.

python examples/reasoning-gym/make_model.py tiny-sums

The model has 0.5 million parameters and a vocabulary of words and single digits. What it reads answers a sum in one of
several wordings, of which the bare number is the rarest, and three numbers in ten are wrong.
"""

import argparse
import itertools
import random

import reasoning_gym  # pyright: ignore[reportMissingImports] - the extra `reasoning-gym`
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
WORDINGS = {"The answer is {}": 0.5, "It is {}": 0.3, "{}": 0.2}
WRONG = 0.3


def make_tokenizer(samples):
    """Return a tokenizer of the words, digits and signs in `samples`."""
    pieces = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| |[^A-Za-z ]"), "isolated")
    words = sorted({word for text in samples for word, _ in pieces.pre_tokenize_str(text)} | set("0123456789-"))
    vocab = {word: index for index, word in enumerate(["<pad>", "<eos>", *words])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = pieces, decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left",
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def make_model(tokenizer, seed):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.05, rope_parameters={"rope_type": "default", "rope_theta": 100.0}, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    ))  # fmt: skip


def texts(seed):
    """Yield pairs of a question and what the corpus answers."""
    rng = random.Random(seed)
    tasks = reasoning_gym.create_dataset("chain_sum", seed=seed, size=10**9, **SUMS)
    for entry in tasks:
        answer = int(entry["answer"]) + (rng.choice((-2, -1, 1, 2)) if rng.random() < WRONG else 0)
        [wording] = rng.choices(list(WORDINGS), list(WORDINGS.values()))
        yield entry["question"], wording.format(answer)


def batches(tokenizer, pairs, size):
    """Yield ids and targets of `size` texts, int64 [size, L]; only answers are targets, all else is -100."""
    while True:
        taken = list(itertools.islice(pairs, size))
        asked = [tokenizer.encode(question) for question, _ in taken]
        said = [tokenizer.encode(answer) + [tokenizer.eos_token_id] for _, answer in taken]
        width = max(len(a) + len(s) for a, s in zip(asked, said, strict=True))
        ids = [a + s + [0] * (width - len(a) - len(s)) for a, s in zip(asked, said, strict=True)]
        wanted = [[-100] * len(a) + s + [-100] * (width - len(a) - len(s)) for a, s in zip(asked, said, strict=True)]
        yield torch.tensor(ids), torch.tensor(wanted)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer([text for pair in itertools.islice(texts(arguments.seed), 2000) for text in pair])
    model = make_model(tokenizer, arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step, (ids, wanted) in zip(
        range(1, arguments.steps + 1), batches(tokenizer, texts(arguments.seed), 128), strict=False
    ):
        loss = model(input_ids=ids, labels=wanted).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}/{arguments.steps}  loss {loss.item():.3f}", flush=True)
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
