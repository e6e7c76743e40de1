"""Turns a GGUF file into a Hugging Face folder with transformers' reader, so that every engine and backend reads it.

The weights of most GGUF files are rounded to few bits. Training needs their values, so they are dequantized once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...dataplane.imports import MissingExtra
from ..errors import UserError

SOURCE_FILE = "headrace_source.json"
"""Name of the file in a fetched or converted folder that says where its weights come from."""
_KEYS = "tokenizer.ggml."
"""Beginning of a GGUF file's keys about its tokenizer."""
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
"""Values of a GGUF file's `tokenizer.ggml.pre` that put each digit into a token of its own. transformers does not read
this key: spaces in front of a number would be cut in another way than the model learned."""
_WHOLE_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Type of a GGUF file's weights -> dtype of the folder. Rounded weights become bfloat16."""


def gguf_file(path: str) -> Path | None:
    """Return the GGUF file that a value of `model.path` names, and None if it names something else. It is the file
    itself, or the only one in a folder without a config.json. Raises UserError for a folder with several."""
    place = Path(path).expanduser()
    if place.suffix.lower() == ".gguf" and place.is_file():
        return place
    if not place.is_dir() or (place / "config.json").exists():
        return None
    found = sorted(place.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise UserError(f"model.path: got {path!r} with {len(found)} GGUF files ({names}), expected the path of one")
    return found[0] if found else None


def readable_model(path: str, tell: Callable[[str], None] | None = None) -> str:
    """Return `path`, or for a GGUF file the Hugging Face folder beside it, which is made at the first call.

    The folder is named after the file, with the ending `-hf`. tell: takes a sentence about the conversion; None prints
    it to stderr. Raises UserError if the file cannot be converted, or if the folder was made from another file, and
    MissingExtra if the package that reads GGUF files is not installed.
    """
    file = gguf_file(path)
    if file is None:
        return path
    folder = file.with_name(f"{file.stem}-hf")
    identity = identity_of(file)
    if os.path.lexists(folder):
        if {key: source_of(folder).get(key) for key in identity} != identity:
            raise UserError(
                f"model.path: {folder} was not made from the present {file.name}, expected its weights; remove it"
            )
        return str(folder)
    tell = tell or (lambda line: print(line, file=sys.stderr))
    if not os.access(file.parent, os.W_OK):
        raise UserError(
            f"model.path: {file.parent} cannot be written, expected a place for the converted weights; "
            f"`headrace fetch {file} --out FOLDER` converts them elsewhere"
        )
    tell(convert_gguf(file, folder, identity))
    return str(folder)


def identity_of(file: Path) -> dict[str, Any]:
    """Return what `headrace_source.json` says of a user's GGUF file."""
    state = file.stat()
    return {"file": file.name, "size": state.st_size, "modified_ns": state.st_mtime_ns}


def convert_gguf(file: Path, folder: Path, source: Mapping[str, Any]) -> str:
    """Write the model in a GGUF file as the new Hugging Face folder `folder`, and return a sentence about it.

    source: where the file is from; it is written into the folder's `headrace_source.json`. All weights are in host
    memory in float32 meanwhile. Raises UserError if transformers cannot read the file, and MissingExtra if the package
    gguf is not installed.
    """
    try:
        import gguf  # An optional package.
    except ModuleNotFoundError:
        raise MissingExtra("gguf", f"the model {file}", "gguf") from None
    before = identity_of(file)
    try:
        reader = gguf.GGUFReader(file)
        kind, dtype = _kind_and_dtype(reader)
        with drafted(folder) as draft:
            with _quiet():
                _write_folder(file, draft, dtype, reader)
            rounded = None if kind in _WHOLE_TYPES else kind
            about = {"sha256": sha256_of(file), **source, "dequantized_from": rounded}
            if identity_of(file) != before:
                raise UserError(f"model.path: {file} has changed while it was read, expected a file that is complete")
            put_in_place(draft, folder, about)
    except UserError:
        raise
    except Exception as error:  # A damaged file makes the libraries below raise any error.
        if (folder / SOURCE_FILE).exists():  # Another process has just made the same folder.
            return f"{file.name}: {folder} was made by another process"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"model.path: {file} cannot be converted, expected a GGUF file: {reason}") from error
    how = "converted" if kind in _WHOLE_TYPES else f"dequantized from {kind}, so they are not the released ones,"
    return f"{file.name}: its weights were {how} to {dtype} in {folder}"


@contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """Context manager with a new folder beside `folder`, in which the latter is written before it has its name.

    It is another one in each thread and on each host, and is removed at the end unless `put_in_place` has renamed it.
    """
    draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        draft.mkdir()
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def put_in_place(draft: Path, folder: Path, about: Mapping[str, Any]) -> None:
    """Write `headrace_source.json` with the content `about` into a finished draft, and rename it to `folder`."""
    (draft / SOURCE_FILE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    draft.rename(folder)


def source_of(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `headrace_source.json`; {} for a folder without one."""
    try:
        content = json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def rounding_note(path: str) -> str:
    """Return a sentence that the weights of a model were dequantized; "" for weights of which this is not known."""
    kind = source_of(Path(path).expanduser()).get("dequantized_from")
    return (
        f"{path}: its weights were dequantized from {kind}, so figures are not those of the released model"
        if kind
        else ""
    )


def sha256_of(file: Path) -> str:
    """Return the SHA-256 digest of a file, as 64 hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager without the progress bars and warnings of the libraries that read and write models."""
    from transformers.utils import logging as library

    shown, disabled = library.is_progress_bar_enabled(), logging.root.manager.disable
    library.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        if shown:
            library.enable_progress_bar()


def _kind_and_dtype(reader: Any) -> tuple[str, str]:
    """Return how the weights of a GGUF file are kept, such as Q4_K_M or F16, and the dtype in which they are written.
    Files of rounded weights mix several types, and say which mixture it is; without that, the most frequent type
    counts."""
    import gguf

    types = [tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1]
    kind = max(set(types), key=types.count)
    mixture, known = reader.get_field("general.file_type"), {int(one): one.name for one in gguf.LlamaFileType}
    name = known.get(mixture.contents(), "") if mixture is not None and kind not in _WHOLE_TYPES else ""
    return name.removeprefix("MOSTLY_") or kind, _WHOLE_TYPES.get(kind, "bfloat16")


def _write_folder(file: Path, folder: Path, dtype: str, reader: Any) -> None:
    """Write configuration, tokenizer and weights of a GGUF file to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    _complete(tokenizer, {name: field.contents() for name, field in reader.fields.items() if name.startswith(_KEYS)})
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # transformers saves no model that it has read from a GGUF file: the same weights go into one that was built.
    content = {key: value for key, value in read.config.to_dict().items() if not key.startswith(("quantization", "_"))}
    config = type(read.config).from_dict(content)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    if read.generation_config is not None:
        model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _complete(tokenizer: Any, said: Mapping[str, Any]) -> None:
    """Set what transformers 5.17 to 5.19 do not read of a GGUF file's tokenizer.

    That is the tokens that begin, end and fill a text, whether a text begins with one, and whether digits are cut
    apart. said: the file's keys about its tokenizer.
    """
    from tokenizers import pre_tokenizers

    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        number = said.get(f"{_KEYS}{theirs}_token_id")
        if number is not None:
            setattr(tokenizer, f"{ours}_token", tokenizer.convert_ids_to_tokens(int(number)))
    # Files of SentencePiece's tokenizers begin texts with a token unless they say otherwise; others do not.
    if said.get(f"{_KEYS}add_bos_token", said.get(f"{_KEYS}model") == "llama"):
        tokenizer.add_bos_token = True
    if said.get(f"{_KEYS}pre") in _DIGITS_APART:
        cut = tokenizer.backend_tokenizer
        cut.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), cut.pre_tokenizer])
