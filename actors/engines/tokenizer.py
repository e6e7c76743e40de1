"""Converts text to token ids and back, in the same way for all code that reads, checks or rolls out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .protocol import Completion, SamplingParams

_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")
_SUFFIXES = (".model", ".tiktoken")
"""Extensions by which tokenizer files are recognised, in addition to the file-name prefixes in `_FILES`."""


def has_tokenizer(path: str) -> bool:
    """Return whether a model folder has a tokenizer. Every hub id and a folder that does not exist count as ones that
    have."""
    folder = Path(path)
    return not folder.is_dir() or any(
        file.name.startswith(_FILES) or file.suffix in _SUFFIXES for file in folder.iterdir()
    )


def load_tokenizer(path: str) -> Any:
    """Load the Hugging Face tokenizer of a local folder or hub id. Raises ValueError with a one-sentence message when
    it cannot be loaded."""
    from transformers import AutoTokenizer  # The import takes seconds, and scripted or dry runs may not need it.

    folder = Path(path)
    if not folder.is_dir() and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise ValueError(f"model.path: got {path!r}, expected a folder that exists or a hub id (organisation/name)")
    expected = "expected a model whose tokenizer can be loaded"
    # If a folder has a config.json but no tokenizer, transformers makes an empty tokenizer.
    if not has_tokenizer(path):
        raise ValueError(f"model.path: got {path!r}, {expected}: the folder has no tokenizer.json or similar file")
    try:
        return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else path)
    except Exception as error:  # A damaged file can make the libraries below raise any error.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"model.path: got {path!r}, {expected}: {reason}") from error


def encode_prompts(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the token ids of each text, int64 `[L]`. The tokenizer adds its special tokens, unless the text already
    begins with the beginning-of-sequence token, as texts rendered by a chat template often do."""
    ids: list[np.ndarray] = [np.zeros(0, np.int64)] * len(texts)
    for add_special, chosen in _by_special_tokens(tokenizer, texts).items():
        if chosen:
            encoded = tokenizer([texts[i] for i in chosen], add_special_tokens=add_special)["input_ids"]
            for i, row in zip(chosen, encoded, strict=True):
                ids[i] = np.asarray(row, dtype=np.int64)
    return ids


def count_tokens(tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """Return the number of tokens that `encode_prompts` would return for each text, int64 `[N]`. A fast tokenizer
    counts them without building arrays of ids."""
    if not getattr(tokenizer, "is_fast", False):
        return np.array([len(ids) for ids in encode_prompts(tokenizer, texts)], np.int64)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    counts = np.zeros(len(texts), np.int64)
    for add_special, chosen in _by_special_tokens(tokenizer, texts).items():
        encoded = backend.encode_batch_fast([texts[index] for index in chosen], add_special_tokens=add_special)
        counts[chosen] = [len(encoding) for encoding in encoded]
    return counts


def _by_special_tokens(tokenizer: Any, texts: Sequence[str]) -> dict[bool, list[int]]:
    """Split the indices of `texts` into two groups. True: texts to which the tokenizer adds its special tokens. False:
    texts that already begin with the beginning-of-sequence token."""
    begin = tokenizer.bos_token
    # A text that starts with the beginning-of-sequence token must not get a second one.
    plain = [not (begin and text.startswith(begin)) for text in texts]
    return {add: [index for index, is_plain in enumerate(plain) if is_plain == add] for add in (True, False)}


def decode_responses(tokenizer: Any, responses: Sequence[np.ndarray]) -> list[str]:
    """Return the text of each response's token ids, without special tokens."""
    if not responses:
        return []
    return tokenizer.batch_decode(
        [response.tolist() for response in responses], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def response_texts(tokenizer: Any, completions: Sequence[Completion], params: SamplingParams) -> list[str]:
    """Return the text of each completion. A stop token is left out, but tokens that complete a stop text
    (`params.stop`) are part of the text."""
    texts = decode_responses(tokenizer, [_without_stop(completion) for completion in completions])
    if not params.stop:
        return texts
    whole = decode_responses(tokenizer, [completion.token_ids for completion in completions])
    return [
        long if completion.finish_reason == "stop" and any(stop in long for stop in params.stop) else short
        for completion, short, long in zip(completions, texts, whole, strict=True)
    ]


def _without_stop(completion: Completion) -> np.ndarray:
    """Return the response's token ids without the stop token. Decoding does not leave out a stop token that is an
    ordinary token, so it is removed here."""
    return completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
