"""Decides which tokens end an answer, in one place for engines, environments, the endpoint and the checks of a run.

A model's generation config, its tokenizer and its chat template can each name such a token, and they often disagree: a
model that was tuned with another template ends its turns with a token that its config does not know. An answer ends at
the tokens of all three. vLLM's server and TRL add the tokenizer's token to those of the config, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .chat_template import ANSWER_MARK, apply_chat_template
from .protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class EndTokens:
    """Ids of the tokens that end an answer, by the part of the model that names them."""

    config: tuple[int, ...] = ()
    """End tokens of the model's generation config, or of its config if it has no generation config."""
    tokenizer: tuple[int, ...] = ()
    """End-of-sequence token of the tokenizer."""
    template: tuple[int, ...] = ()
    """Token that the chat template puts after an assistant's answer."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids, ascending."""
        return tuple(sorted({*self.config, *self.tokenizer, *self.template}))


def tokenizer_ends(tokenizer: Any) -> EndTokens:
    """Return the end tokens that a tokenizer and its chat template name."""
    end = tokenizer.eos_token_id
    return EndTokens(tokenizer=() if end is None else (int(end),), template=_template_end(tokenizer))


def end_tokens(path: str, tokenizer: Any) -> EndTokens:
    """Return the end tokens of the model at `path`, a folder or hub id. tokenizer: its tokenizer; None if it has none.

    Reads only the files of the model's configuration, as `from_pretrained` does. A folder without a config names no
    token there. Raises ValueError with a sentence for files that cannot be read, or that name what is no token.
    """
    ids = _config_ends(path, None if tokenizer is None else len(tokenizer))
    return EndTokens(ids) if tokenizer is None else replace(tokenizer_ends(tokenizer), config=ids)


def _config_ends(path: str, vocab_size: int | None) -> tuple[int, ...]:
    from transformers import AutoConfig, GenerationConfig  # The import takes seconds, and scripted runs do not need it.

    folder = Path(path).expanduser()
    source = str(folder) if folder.is_dir() else path
    file = "generation_config.json"
    if folder.is_dir() and not (folder / "config.json").is_file():
        return ()
    try:
        try:
            config = GenerationConfig.from_pretrained(source)
        except OSError:
            if (folder / "generation_config.json").exists():
                raise
            file = "config.json"
            config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(source))
    except Exception as error:  # A damaged file can make transformers raise any error.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"model.path: got {path!r}, expected a model whose configs can be read: {reason}") from error
    named = config.eos_token_id
    ids = named if isinstance(named, list | tuple) else () if named is None else (named,)
    if not all(type(one) is int and 0 <= one < (vocab_size or one + 1) for one in ids):
        below = "" if vocab_size is None else f" below {vocab_size}, the number of the tokenizer's tokens"
        raise ValueError(f"model.path: {file} of {path!r} has eos_token_id {named!r}, expected ids of tokens{below}")
    return tuple(ids)


def _template_end(tokenizer: Any) -> tuple[int, ...]:
    """Return the token that the chat template puts after an answer; () unless it is a token added to the vocabulary.

    Some templates, such as that of GLM-4, end a turn with nothing. The mark of the next message then follows the
    answer.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ()
    asked, answer = {"role": "user", "content": "-"}, {"role": "assistant", "content": ANSWER_MARK}
    for messages in ([asked, answer], [asked, answer, asked]):
        try:
            _, found, after = apply_chat_template(tokenizer, messages, {}, prompted=False).rpartition(ANSWER_MARK)
        except ValueError:  # The template needs arguments or other messages, so it shows no token here.
            continue
        # Texts are compared, because an unknown character can be encoded as a special token, such as a padding token.
        tokens = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
        if begun := [token for token in tokens if found and after.lstrip().startswith(token)]:
            return (tokens[max(begun, key=len)],)
    return ()


def end_note(ends: EndTokens, tokenizer: Any) -> str | None:
    """Return a sentence for the user if the files of a model disagree on end tokens, else None.

    They disagree if the tokenizer or the chat template names a token that the model's config does not name. There is
    also a sentence if no file names one.
    """
    if not ends.ids:
        return (
            "no file of the model names a token that ends an answer, so that a sample ends only at rollout.stop, "
            "rollout.stop_token_ids or rollout.max_new_tokens"
        )
    if {*ends.tokenizer, *ends.template} <= {*ends.config}:
        return None
    sources = {"generation config": ends.config, "tokenizer": ends.tokenizer, "chat template": ends.template}
    named = "; ".join(f"{source}: {_shown(tokenizer, ids)}" for source, ids in sources.items())
    return f"the files of the model name different ends of an answer, and a sample ends at each of them ({named})"


def _shown(tokenizer: Any, ids: Sequence[int]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(id_)} ({id_})" for id_ in ids) or "none"


def resolve_stops(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Return sampling parameters in which each stop text that is a special token has become a stop token id. Decoding
    leaves special tokens out, so that such a text would never be found in an answer.

    Raises ValueError if there are stop texts and `tokenizer` is None, and for a text that is a special token with more
    text around it.
    """
    if not params.stop:
        return params
    if tokenizer is None:
        raise ValueError(f"stop: got {list(params.stop)}, expected none, because the model has no tokenizer")
    special = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = tuple(text for text in params.stop if text not in special)
    for text in texts:
        if inside := next((token for token in special if token in text), None):
            raise ValueError(
                f"stop: got {text!r}, expected the special token {inside!r} alone or text without it, because the text "
                "of an answer has no special tokens"
            )
    ids = tuple(special[text] for text in params.stop if text in special)
    return replace(params, stop=texts, stop_token_ids=(*params.stop_token_ids, *ids))
