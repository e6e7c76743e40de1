"""Reads HF causal LMs, whole or one tensor at a time, and writes trained weights back as a HF model folder.

Each rank reads only the weights of its part of the model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, GenerationConfig
from transformers.utils import logging as hf_logging
from transformers.utils.hub import cached_file

from ...actors.engines.config import Attention
from ...actors.engines.hf.model import attention_options, auto_class, refused_attention
from ...actors.engines.hf.stored_names import StoredTensor, stored_tensors
from ...actors.engines.tokenizer import has_tokenizer, load_tokenizer
from .checkpoint_files import draft_of, publish, start_draft

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Names of the files of a model's processor of pictures."""
SHARD_BYTES = 4 << 30
"""Largest size of one weight file in bytes. Writing a file needs that much additional host memory."""


def load_causal_lm(model: str, attention: Attention = "auto") -> Any:
    """Load the HF model of a local folder or hub id in float32 on the CPU, with dropout off.

    attention: as in `ModelConfig`. Dropout stays off in training too, because its noise would make the log-probs of one
    policy differ between two passes. Raises ValueError when there is no such model, or when it does not support this
    kind of attention.
    """
    hf_logging.disable_progress_bar()  # One progress bar per rank would garble the run's own progress display.
    try:
        with _refusing(attention, model):
            config = AutoConfig.from_pretrained(model)
            options: dict[str, Any] = attention_options(attention, config)
            return auto_class(config).from_pretrained(model, dtype=torch.float32, **options).eval()
    except OSError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"model.path: got {model!r}, expected a folder with a HF causal LM or a hub id of one ({reason})"
        ) from error


def build_empty(model: str, config: Any, attention: Attention, dtype: torch.dtype | None = None) -> Any:
    """Return a causal LM on the meta device, without values of weights and buffers, with dropout off.

    model: its folder or hub id. config: its HF config. attention: as in `ModelConfig`. dtype: dtype of the weights;
    None for the dtype in the config. Raises ValueError when the model does not support the kind of attention.
    """
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    options |= attention_options(attention, config)
    with torch.device("meta"), _refusing(attention, model):
        # Each model has a config of its own, in which its kind of attention stands.
        built = auto_class(config).from_config(copy.deepcopy(config), **options)
    with contextlib.suppress(OSError):  # A model without a generation config uses its model config.
        built.generation_config = GenerationConfig.from_pretrained(model)
    return built.eval()


@contextlib.contextmanager
def _refusing(attention: Attention, model: str) -> Iterator[None]:
    """Context manager that names the key where transformers refuses a kind of attention that the user has chosen."""
    try:
        yield
    except (ValueError, ImportError) as error:
        said = str(error)
        if attention == "auto" or said.startswith("model.attention") or "attention" not in said.lower():
            raise
        raise refused_attention(attention, model, error) from error


def write_folder(
    path: str,
    model: Any,
    weights: Mapping[str, torch.Tensor],
    source: str,
    *,
    add: Callable[[str], None] | None = None,
) -> None:
    """Write `weights`, and config, tokenizer and processor of pictures of the model `source`, as the HF folder `path`.

    source: folder or hub id. What it does not have is not written. The number format in the config is that of most
    weights. Only one rank may call this. The folder `path` appears whole or not at all. Raises ValueError when it
    exists already. add: function that writes further files into the folder, given its path before it appears.
    """
    start_draft(path)
    # Persistent buffers belong to the folder too; a model on the meta device has no values for them.
    kept = model.state_dict(keep_vars=True)
    buffers = {name: value for name, value in model.named_buffers() if name in kept and not value.is_meta}
    model.save_pretrained(draft_of(path), state_dict={**weights, **buffers}, max_shard_size=SHARD_BYTES)
    sizes = Counter[torch.dtype]()
    for tensor in weights.values():
        sizes[tensor.dtype] += tensor.numel()
    if sizes:  # transformers writes the format in which the trainer keeps the weights.
        config = Path(draft_of(path)) / "config.json"
        content = json.loads(config.read_text(encoding="utf-8"))
        _set_dtypes(content, str(sizes.most_common(1)[0][0]).removeprefix("torch."))
        config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if has_tokenizer(source):
        load_tokenizer(source).save_pretrained(draft_of(path))
    if hasattr(model.config, "vision_config"):
        _copy_processor(source, draft_of(path))
    if add is not None:
        add(draft_of(path))
    publish(path)


def _copy_processor(source: str, target: str) -> None:
    """Copy the files of a model's processor of pictures as they are, because to load them can need other libraries."""
    for name in PROCESSOR_FILES:
        local = Path(source) / name
        hub: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
        file = local if Path(source).is_dir() else cached_file(source, name, **hub)
        if file is not None and Path(file).exists():
            shutil.copyfile(file, Path(target) / name)


def _set_dtypes(content: dict[str, Any], dtype: str) -> None:
    """Set the dtype in a model's config and in its sections, such as that of the text part of a multimodal model."""
    content["dtype"] = dtype
    for part in content.values():
        if isinstance(part, dict) and "dtype" in part:
            _set_dtypes(part, dtype)


def kept_in_float32(model: Any) -> Callable[[str], bool]:
    """Return a function that tells, by name, which weights of an HF model stay in float32 in bfloat16 models."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    found = re.compile("|".join(re.escape(one).replace(r"\*", ".*") for one in patterns) or "(?!)")
    return lambda name: found.search(name) is not None


def collect(
    stream: Iterable[tuple[str, torch.Tensor]], *, keep: bool, dtype_of: Callable[[str], torch.dtype | None]
) -> dict[str, torch.Tensor]:
    """Read the pairs (name, tensor) of `stream` to the end and return copies of the tensors in host memory, by name.
    Without `keep` the tensors are dropped and the result is {}. dtype_of: returns the dtype of a copy; None for the
    tensor's own."""
    return {name: tensor.to("cpu", dtype_of(name), copy=True) for name, tensor in stream if keep}


def export_dtypes(chosen: str, source: str) -> Callable[[str], torch.dtype | None]:
    """Return a function from a weight's name to the dtype in which it is exported.

    chosen: `trainer.export_dtype`, the dtype of all weights or "source". source: folder or hub id of the initial model.
    With "source" a weight gets the dtype that it has in the safetensors files of that model. A weight that is not there
    gets that of the model's config, or float32.
    """
    if chosen != "source":
        return lambda name: getattr(torch, chosen)
    try:
        files = HfSource(source)
    except ValueError:  # The folder has no safetensors files.
        default = _config_dtype(AutoConfig.from_pretrained(source))
        return lambda name: default
    default = _config_dtype(files.config)
    return lambda name: files.dtype(name) or default


def _config_dtype(config: Any) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Name of a float format in safetensors files -> dtype."""


class HfSource:
    """The config and the safetensors weights of a Hugging Face model, given as a local folder or hub id. Tensors are
    read only when they are requested."""

    def __init__(self, model: str, attention: Attention = "auto") -> None:
        """Read the config and find out which safetensors file contains each tensor. Raises ValueError when there is no
        such model or it has no safetensors files.

        attention: kind of attention of `empty_model`, as in `ModelConfig`.
        """
        self._model = model
        self._attention: Attention = attention
        self._reading = False
        self._open: tuple[str, Any] | None = None
        """Path of the file that `reading` keeps open, and what safetensors opened; None for none."""
        try:
            self.config: Any = AutoConfig.from_pretrained(model)
            self._files = self._locate()
        except OSError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(
                f"model.path: got {model!r}, expected a folder with a HF causal LM or a hub id of one ({reason})"
            ) from error

    def has(self, name: str) -> bool:
        """Return whether the safetensors files contain the tensor `name`, or the matrices of its experts. `tensor` and
        `pieces` can then read it."""
        return name in self._stored

    @property
    def files(self) -> dict[str, str]:
        """The path of the safetensors file that contains each tensor, by the tensor's name in the files."""
        return self._files

    def stored_name(self, name: str) -> str:
        """Return the name in the files of the tensor `name`. Raises ValueError if they do not have it as a whole."""
        stored = self._found(name)
        if stored.stacked:
            raise ValueError(f"model.path: {self._model!r} has the tensor {name!r} in parts")
        return stored.parts[0][0]

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of the tensor `name` in the files.

        None means that it is not there, or not a float of 16 bits or more."""
        if not self.has(name):
            return None
        first = self._stored[name].parts[0][0]
        with self._opened(first) as file:
            return _DTYPES.get(file.get_slice(first).get_dtype())

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager in which a file stays open until another file is read. Its list of tensors is then read once
        instead of for each tensor. No more than one file is mapped into memory at a time."""
        self._reading = True
        try:
            yield
        finally:
            self._reading, self._open = False, None

    def pieces(self, name: str, ranges: tuple[slice, ...]) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """Yield a part of the tensor `name` in pieces: each piece's place in that part, and its values. The values have
        the dtype of the file. `ranges` has one slice for each dimension.

        Only that part is read. A tensor in the files is one piece; where the folder stores experts one by one, each of
        their matrices is a piece, so that no more than one of them is in memory. Values may lie in the mapped file
        itself. Raises ValueError when the tensor does not exist.
        """
        stored = self._found(name)
        if not stored.stacked:
            yield tuple(slice(0, part.stop - part.start) for part in ranges), self._read(stored.parts[0][0], ranges)
            return
        experts, rows, columns = ranges
        # All experts have the same heights.
        heights = [self._shape(part)[0] for part in stored.parts[experts.start]]
        for expert in range(experts.start, experts.stop):
            start = 0  # `start` is the first row of the matrix in the stacked tensor.
            for part, height in zip(stored.parts[expert], heights, strict=True):
                end = start + height
                first, last = max(rows.start, start), min(rows.stop, end)
                if first < last:
                    place = slice(expert - experts.start, expert - experts.start + 1)
                    values = self._read(part, (slice(first - start, last - start), columns))
                    yield (place, slice(first - rows.start, last - rows.start), slice(0, values.shape[1])), values
                start = end

    def tensor(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Return the tensor `name`, or only `[start:stop]` of it along dimension 0, in the dtype of the file.

        `name` is the HF model's own name. Experts that the folder stores one by one are stacked. Raises ValueError when
        the tensor does not exist.
        """
        stored = self._found(name)
        if not stored.stacked:
            return self._read(stored.parts[0][0], () if start is None and stop is None else (slice(start, stop),))
        experts = range(len(stored.parts))[start:stop]
        shapes = [self._shape(part) for part in stored.parts[experts.start]]
        rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
        ranges = (slice(experts.start, experts.stop), slice(0, rows), slice(0, columns))
        whole: torch.Tensor | None = None
        for place, values in self.pieces(name, ranges):
            if whole is None:
                whole = torch.empty((len(experts), rows, columns), dtype=values.dtype)
            whole[place] = values
        assert whole is not None, "a rank has at least one expert"
        return whole

    @functools.cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        return stored_tensors(self.empty_model(), self._files)[0]

    def _found(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise ValueError(f"model.path: {self._model!r} has no tensor {name!r} in its safetensors files")
        return self._stored[name]

    def empty_model(self, dtype: torch.dtype | None = None) -> Any:
        """Return the HF model on the meta device, without values of weights and buffers, with dropout off.

        dtype: dtype of the weights; None for the dtype in the model's config. Raises ValueError when the model does not
        support the kind of attention.
        """
        return build_empty(self._model, self.config, self._attention, dtype)

    def _read(self, name: str, ranges: tuple[slice, ...] = ()) -> torch.Tensor:
        with self._opened(name) as file:
            return file.get_slice(name)[ranges] if ranges else file.get_tensor(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        with self._opened(name) as file:
            return tuple(file.get_slice(name).get_shape())

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """Context manager that provides the safetensors file that contains the tensor `name`."""
        path = self._files[name]
        if not self._reading:
            with safe_open(path, framework="pt") as file:
                yield file
            return
        if self._open is None or self._open[0] != path:
            # The previous file closes when its last tensor is freed.
            self._open = path, safe_open(path, framework="pt")
        yield self._open[1]

    def _locate(self) -> dict[str, str]:
        """Return the path of the safetensors file that contains each tensor: tensor name -> path. Raises OSError when a
        safetensors file is missing."""
        index = self._path(INDEX)
        if index is None:
            path = self._path(ONE_FILE)
            if path is None:
                raise OSError(f"found neither {ONE_FILE} nor {INDEX}")
            with safe_open(path, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), path)
        with open(index) as file:
            shards: dict[str, str] = json.load(file)["weight_map"]
        return dict(zip(shards, self._paths(shards.values()), strict=True))

    def _paths(self, names: Iterable[str]) -> list[str]:
        names = list(names)
        found = {name: self._path(name) for name in set(names)}
        missing = sorted(name for name, path in found.items() if path is None)
        if missing:
            raise OSError(f"{INDEX} names {missing[0]}, which does not exist")
        return [str(found[name]) for name in names]

    def _path(self, name: str) -> str | None:
        if os.path.isdir(self._model):
            path = os.path.join(self._model, name)
            return path if os.path.exists(path) else None
        return cached_file(self._model, name, _raise_exceptions_for_missing_entries=False)
