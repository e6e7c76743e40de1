"""Makes a byte-level tokenizer of any size on the spot, for models with random weights."""

from __future__ import annotations

import string
from collections.abc import Iterator
from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The last tokens of every tokenizer: those that pad a row, begin it and end it."""
_LETTERS = (*string.ascii_lowercase, *string.ascii_uppercase, *string.digits, "\u0120")
"""Characters of which the longer tokens are made; the last one stands for a space in a byte-level tokenizer."""


def byte_level_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """Return a byte-pair tokenizer with `num_tokens` tokens: 256 bytes, then pairs and triples of letters, then the
    three of SPECIAL. It encodes every text, and a text of letters takes about a token for three of them."""
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
