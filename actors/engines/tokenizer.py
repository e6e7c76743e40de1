"""Converts text to token ids and back, in the same way for all code that reads, checks or rolls out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .protocol import Completion, SamplingParams

_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")
_SAMPLE_CHARS = 32
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


def find_tokenizer(path: str) -> Any | None:
    """Load the tokenizer of a model as `load_tokenizer` does; None for a folder without one.

    An engine can still serve token ids from such a folder.
    """
    return load_tokenizer(path) if has_tokenizer(path) else None


def encode_prompts(tokenizer: Any, texts: Sequence[str], rendered: Sequence[bool] = ()) -> list[np.ndarray]:
    """Return the token ids of each text, int64 `[L]`.

    A text gets the tokens that the tokenizer puts in front of it, such as the beginning-of-sequence token, unless it
    begins with them already. It never gets the end token that some tokenizers append. rendered: for each text, whether
    a chat template made it; such a text is tokenised as it is. () if all texts are plain.
    """
    front, fronted = _front(tokenizer, texts, rendered)
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if len(texts) else []
    return [
        np.asarray([*front, *ids] if is_fronted else ids, dtype=np.int64)
        for ids, is_fronted in zip(encoded, fronted, strict=True)
    ]


def count_tokens(tokenizer: Any, texts: Sequence[str], rendered: Sequence[bool] = ()) -> np.ndarray:
    """Return the number of tokens that `encode_prompts` would return for each text, int64 `[N]`. A fast tokenizer
    counts them without building arrays of ids."""
    if not getattr(tokenizer, "is_fast", False):
        return np.array([len(ids) for ids in encode_prompts(tokenizer, texts, rendered)], np.int64)
    front, fronted = _front(tokenizer, texts, rendered)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    counts = [len(encoding) for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    return np.array(counts, np.int64) + len(front) * np.array(fronted, np.int64)


def _front(tokenizer: Any, texts: Sequence[str], rendered: Sequence[bool]) -> tuple[list[int], list[bool]]:
    """Return the ids that the tokenizer puts in front of a text, and whether each of `texts` gets them."""
    if rendered and all(rendered):
        return [], [False] * len(texts)
    sample = next(filter(None, texts), "a")[:_SAMPLE_CHARS]
    bare, whole = (tokenizer(sample, add_special_tokens=added)["input_ids"] for added in (False, True))
    starts = [at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare]
    if not starts:
        raise ValueError(
            f"model.path: its tokenizer encodes {sample!r} as {whole}, expected {bare} with special tokens only before "
            "and after it"
        )
    front = whole[: starts[0]]
    begin = "".join(tokenizer.convert_ids_to_tokens(front))
    are_chats = rendered or [False] * len(texts)
    return front, [
        not (is_chat or (begin and text.startswith(begin))) for text, is_chat in zip(texts, are_chats, strict=True)
    ]


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
