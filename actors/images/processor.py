"""Loads a model's own processor of pictures, and asks it for everything that differs between families of models.

The outputs for one picture are the parts of a blob, under the names that the model's forward pass has for them. A
picture is always processed alone, so that its tensors do not depend on the others of its prompt.
"""

from __future__ import annotations

import inspect
import io
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import PIL.Image
import torch
import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from ...codecs.blobs import Blob, blob_field
from ...codecs.memory import as_bytes
from ...codecs.schema import DTYPES, Field, Kind
from ..process.user_errors import counted
from .config import IMAGES, ImagesConfig
from .prompt_pictures import BadPicture, Picture, is_url, upright_rgb

NUM_TOKENS = "num_tokens"
"""Part of a picture with the number of its placeholder tokens in a row, int32."""
_PARTS = ("image_processor", "tokenizer", "video_processor", "feature_extractor", "audio_processor", "chat_template")
_ORIENTATION, _FIRST_TURNED = 0x0112, 5
"""Key of EXIF's orientation, and the first of its values at which width and height change places."""
_BLANK = (112, 84)
"""Width and height of the blank picture that shows the form of a processor's outputs."""


@dataclass(frozen=True, slots=True)
class Processed:
    """A preprocessed picture in a form that goes from process to process."""

    parts: tuple[tuple[str, str, tuple[int, ...], np.ndarray], ...]
    """Inputs of the model for the picture: name, dtype, shape and bytes of each, uint8 `[n]`."""
    text: str
    """Text that stands for the picture in a prompt, in place of one placeholder."""
    num_tokens: int
    """Number of placeholder tokens in `text`."""
    seconds: float = 0.0
    """Seconds that it took to decode and preprocess the picture."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A picture that is ready for engines and for the data plane."""

    blob: Blob
    """Inputs of the model for the picture, and NUM_TOKENS."""
    text: str
    """Text that stands for the picture in a prompt, in place of one placeholder."""
    num_tokens: int
    """Number of placeholder tokens in `text`, which is the number of the picture's features."""
    num_bytes: int
    """Number of bytes of the model's inputs for the picture."""


class PictureProcessor:
    """The processor of pictures of one model."""

    def __init__(self, config: ImagesConfig, model: str, tokenizer: Any) -> None:
        """model: folder or hub id of the model. Raises ValueError with one sentence if it has no processor of pictures
        that can be loaded."""
        path = config.processor or model
        key = "data.images.processor" if config.processor else "model.path"
        backend = {} if config.backend == "auto" else {"backend": config.backend}
        try:
            self._images = transformers.AutoImageProcessor.from_pretrained(path, **backend, **config.processor_options)
            self._whole = _without_video(model, path, self._images, tokenizer)
        except Exception as error:  # Damaged or foreign files can make transformers raise any error.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{key}: got {path!r}, expected a model with a processor of pictures: {reason}") from error
        kind = type(self._images)
        library = "torchvision" if any(base.__name__ == "TorchvisionBackend" for base in kind.__mro__) else "pil"
        _check(config, self._images, library)
        self._tokenizer = tokenizer
        self._dtype = DTYPES[config.dtype]
        self.placeholder: str = self._whole.image_token
        """Text that stands for one picture in a rendered prompt."""
        self.token_ids: tuple[int, ...] = _ids(self._whole.image_token_ids)
        """Token ids of the features of pictures."""
        self.other_ids: tuple[int, ...] = _ids([*self._whole.video_token_ids, *self._whole.audio_token_ids])
        """Token ids of the features of videos and recordings, which no row may have."""
        self.note = (
            f"pictures are preprocessed once, by {kind.__name__} of {path} ({library}, transformers "
            f"{transformers.__version__}, {config.dtype})"
        )
        """Sentence for the log that names the processor."""
        try:
            self.field = self._declared()
        except BadPicture as error:
            raise ValueError(f"data.images.processor_options: got {config.processor_options}, but {error}") from error
        """Declaration of the column of pictures."""

    def expanded(self, text: str, pictures: Sequence[Prepared], place: str) -> str:
        """Return a prompt's text with the texts of its pictures in place of the placeholders, in order. Raises
        BadPicture, naming the place and both counts, if there are not as many placeholders as pictures."""
        first, *rest = text.split(self.placeholder)
        if len(rest) != len(pictures):
            hint = "" if rest else "; with data.chat_template=all, a text prompt gets them"
            raise BadPicture(
                f"{place}: the text has {counted(len(rest), 'placeholder')} {self.placeholder!r}, but the row has "
                f"{counted(len(pictures), 'picture')}, expected one for each{hint}"
            )
        return first + "".join(picture.text + part for picture, part in zip(pictures, rest, strict=True))

    def added_tokens(self, pictures: Sequence[Picture]) -> int:
        """Return how many tokens pictures add to a text that has one placeholder token for each, from their sizes.

        Pictures that are still to be fetched, and those that cannot be read, add none; `process` says what is wrong.
        """
        added = 0
        for picture in pictures:
            if is_url(picture.address):
                continue
            with suppress(Exception):  # Damaged files make the decoders raise any error.
                with _opened(io.BytesIO(picture.data) if picture.data else picture.address) as image:
                    turned = image.getexif().get(_ORIENTATION, 1) >= _FIRST_TURNED
                    size = image.size if turned else image.size[::-1]
                added += self._whole._get_num_multimodal_tokens(image_sizes=[size])["num_image_tokens"][0] - 1
        return added

    def within(self, ids: Sequence[int] | np.ndarray, pictures: Sequence[Prepared], place: str) -> tuple[Prepared, ...]:
        """Return the first of the pictures, whose tokens are all in `ids`. Raises BadPicture, naming the place, if the
        last of them has only some of its tokens there."""
        found, ends = int(np.isin(ids, self.token_ids).sum()), np.cumsum([0, *(one.num_tokens for one in pictures)])
        count = int(np.searchsorted(ends, found, side="right")) - 1
        if ends[count] != found and count < len(pictures):
            raise BadPicture(f"{place}: {len(ids)} tokens end within picture {count}, expected all of its tokens")
        return tuple(pictures[:count])

    def whole_length(self, ids: np.ndarray, pictures: Sequence[Prepared], most: int) -> int:
        """Return the largest number of first tokens of `ids`, at most `most`, that end within none of the pictures."""
        places, ends = (
            np.flatnonzero(np.isin(ids, self.token_ids)),
            np.cumsum([0, *(one.num_tokens for one in pictures)]),
        )
        found = int(np.searchsorted(places, most))
        whole = int(ends[np.searchsorted(ends, found, side="right") - 1])
        return most if whole == found else int(places[whole])

    def check_row(self, ids: np.ndarray, num_tokens: Sequence[int], key: str) -> None:
        """Check that a row has exactly the placeholder tokens of its pictures.

        ids: token ids of the row without those that the policy sampled, which stand for themselves, `[L]`. num_tokens:
        number of tokens of each picture. Raises BadPicture, naming the row and the picture.
        """
        if other := np.flatnonzero(np.isin(ids, self.other_ids)).tolist():
            raise BadPicture(f"{key}: token {other[0]} stands for a video or a recording, expected only pictures")
        found, wanted = int(np.isin(ids, self.token_ids).sum()), sum(num_tokens)
        if found == wanted:
            return
        ends = np.cumsum(num_tokens, dtype=np.int64)
        picture = min(int(np.searchsorted(ends, found, side="right")), max(len(num_tokens) - 1, 0))
        last = f"picture {picture} has {num_tokens[picture]}" if num_tokens else "it has no picture"
        raise BadPicture(
            f"{key}: the row has {counted(found, 'placeholder token')} of pictures, expected {wanted}, one for each "
            f"feature of its {counted(len(num_tokens), 'picture')} ({last})"
        )

    def process(self, data: bytes) -> Processed:
        """Preprocess an encoded picture. Raises BadPicture with the reason if it cannot be decoded or processed."""
        started = time.perf_counter()
        found = self._processed(_decoded(data))
        return replace(found, seconds=time.perf_counter() - started)

    def prepared(self, processed: Processed) -> Prepared:
        """Return the picture as a blob, with its digest. processed: result of `process`, here or in another process."""
        parts = {name: as_tensor(values, dtype, shape) for name, dtype, shape, values in processed.parts}
        count = torch.tensor(processed.num_tokens, dtype=torch.int32)
        blob, size = Blob(self.field, {**parts, NUM_TOKENS: count}), sum(len(values) for *_, values in processed.parts)
        return Prepared(blob.named(), processed.text, processed.num_tokens, size)

    def _processed(self, image: Any) -> Processed:
        try:
            found = self._images([image], return_tensors="pt")
            text = self._whole.replace_image_token(found, 0)
        except Exception as error:  # The library raises ValueError and others, for example for extreme shapes.
            raise BadPicture(f"the processor does not take it: {error}") from error
        parts = []
        for name in sorted(set(found) - set(self._whole.unused_input_names)):
            tensor = found[name].contiguous()
            tensor = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
            parts.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), as_bytes(tensor)))
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return Processed(tuple(parts), text, int(np.isin(ids, self.token_ids).sum()))

    def _declared(self) -> Field:
        """Return the declaration of the column, found by processing a blank picture."""
        blank = self._processed(PIL.Image.new("RGB", _BLANK))
        if not blank.num_tokens:
            raise ValueError(f"the processor gives a picture no placeholder tokens {self.token_ids}")
        parts = [Field(name, Kind.RAGGED, DTYPES[dtype], ndim=len(shape)) for name, dtype, shape, _ in blank.parts]
        return blob_field(IMAGES, [*parts, Field(NUM_TOKENS, Kind.PER_SAMPLE, torch.int32)])


def as_tensor(values: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor with these bytes."""
    return torch.from_numpy(np.require(values, requirements="W")).view(DTYPES[dtype]).reshape(shape)


def _decoded(data: bytes) -> PIL.Image.Image:
    """Return an encoded picture as an upright RGB image. Raises BadPicture if it is none, or is too large."""
    try:
        with _opened(io.BytesIO(data)) as image:
            return upright_rgb(image)
    except PIL.UnidentifiedImageError:
        raise BadPicture(f"got {len(data)} bytes that begin with {data[:12]!r}, expected a picture") from None
    except Exception as error:  # Damaged files make the decoders raise OSError, SyntaxError, struct.error and others.
        raise BadPicture(f"it cannot be decoded: {error}") from error


def _check(config: ImagesConfig, images: Any, library: str) -> None:
    """Raise ValueError if transformers has ignored an option of the image processor, or the library of the config."""
    known = sorted(inspect.get_annotations(images.valid_kwargs))
    for name in config.processor_options:
        if name not in known and not hasattr(images, name):
            raise ValueError(
                f"data.images.processor_options: got {name!r}, expected options of {type(images).__name__}: "
                f"{', '.join(known)}"
            )
    if config.backend not in ("auto", library):
        raise ValueError(
            f"data.images.backend: got {config.backend!r}, but transformers gives {type(images).__name__}, expected "
            f"{library!r} or an installed {config.backend}"
        )


@contextmanager
def _opened(source: Any) -> Iterator[PIL.Image.Image]:
    """Context manager that opens a picture of any format that PIL reads by itself. For EPS, PIL would start another
    program, which runs what is in the file."""
    PIL.Image.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # They are on damaged EXIF data and the like, and name no picture.
        warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
        with PIL.Image.open(source, formats=[name for name in PIL.Image.OPEN if name != "EPS"]) as image:
            yield image


def _ids(ids: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(one for one in ids if one is not None)


def _without_video(model: str, path: str, images: Any, tokenizer: Any) -> Any:
    """Return the model's whole processor, without its parts for videos, which only load where torchvision is."""
    config = transformers.AutoConfig.from_pretrained(model)
    kind: Any = PROCESSOR_MAPPING[type(config)]
    taken = inspect.signature(kind.__init__).parameters
    stored, _ = kind.get_processor_dict(path)
    options = {name: value for name, value in stored.items() if name in taken and name not in _PARTS}
    loose = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, value: type(value)})
    absent = {name: None for name in _PARTS[2:] if name in taken}
    return loose(image_processor=images, tokenizer=tokenizer, **absent, **options)
