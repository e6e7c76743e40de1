"""Makes tokenizers for models with random weights: one token per character, or byte-pair tokens."""

from __future__ import annotations

import string
from collections.abc import Iterator
from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The last three tokens of every byte-level tokenizer: the padding token, the begin token and the end token."""
_LETTERS = (*string.ascii_lowercase, *string.ascii_uppercase, *string.digits, "\u0120")
"""Characters that the longer tokens consist of. The last one stands for a space in a byte-level tokenizer."""
DIGITS = "0123456789"
SYMBOLS = DIGITS + "=" + "abcdefghijklmnopqrstuvwxyz"
SPECIALS = ("<pad>", "<bos>", "<eos>")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a character-level tokenizer with one id per symbol. It adds no special tokens and pads on the left."""
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


def byte_level_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """Return a byte-pair tokenizer with `num_tokens` tokens. They are the 256 bytes, then pairs and triples of letters,
    then the three tokens of SPECIAL. The tokenizer encodes every text, and needs about one token for three letters."""
    vocabulary = {piece: number for number, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = list(islice(_merges(), num_tokens - len(vocabulary) - len(SPECIAL)))
    for first, second in merges:
        vocabulary[first + second] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens(dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True)))
    assert len(fast) == num_tokens, (len(fast), num_tokens)
    return fast


def _merges() -> Iterator[tuple[str, str]]:
    pairs = [(first, second) for first in _LETTERS for second in _LETTERS]
    yield from pairs
    for first, second in pairs:
        for third in _LETTERS:
            yield first + second, third
