"""Finds the pictures of a prompt in the values of a data set, and reads their bytes where they are preprocessed.

A picture is a path, bytes, a PIL image, an array of pixels, a mapping with `bytes` or `path` as the library datasets
stores it, a data URI or, if that is allowed, a URL. Only the pictures of a data set's first row are read before their
prompt is about to be rolled out, as a check of their folder.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import os
import string
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote_to_bytes

import numpy as np

from ...codecs.counts import Counts
from ..process.user_errors import counted

T = TypeVar("T")
MAX_BYTES = 256 << 20
"""Largest number of bytes of an encoded picture."""
FETCH_S = 30.0
"""Longest time in seconds in which a picture must be fetched."""
_EXPECTED = "expected a path, bytes, a PIL image, an array of pixels, a mapping with `bytes` or `path`, or a data URI"


@dataclass(frozen=True, slots=True)
class PictureCounts(Counts):
    """Counts of the pictures that a rollout actor prepared for prompts and episodes."""

    processed: int = 0
    """Number of pictures that were preprocessed."""
    reused: int = 0
    """Number of pictures that had been preprocessed already, or were being so."""
    num_bytes: int = 0
    """Number of bytes of the preprocessed pictures."""
    seconds: float = 0.0
    """Seconds in which processes preprocessed pictures, summed over the processes."""


class BadPicture(ValueError):
    """A picture cannot be used. The message is one sentence that names its place and the reason."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a prompt that has not been read yet."""

    place: str
    """Place of the picture, for messages, such as `picture 0 of line 3 of 'my.jsonl'`."""
    data: bytes = b""
    """Encoded picture, such as the content of a PNG file; b"" if it is still to be read."""
    address: str = ""
    """Path or URL to read the picture from; "" if `data` has it."""

    def read(self) -> bytes:
        """Return the encoded picture. Raises BadPicture if it cannot be read, is empty or is too large."""
        if self.data:
            return self.data
        try:
            if is_url(self.address):
                data = _fetched(self.address)
            else:
                with open(self.address, "rb") as source:
                    data = source.read(MAX_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no address, or no path.
            reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
            said = " ".join(str(reason).split())
            raise BadPicture(f"{self.place}: {self.address!r:.200} cannot be read: {said}") from None
        if not data or len(data) > MAX_BYTES:
            found = "more" if data else "0 bytes"
            raise BadPicture(f"{self.place}: got {found} from {self.address!r}, expected 1 to {MAX_BYTES} bytes")
        return data


def is_url(address: str) -> bool:
    """Return whether a text names a picture by its address on the web."""
    return address.lower().startswith(("http://", "https://"))


class _OnlyWeb(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not is_url(newurl):
            said = f"it leads to {newurl!r:.80}, expected an address that begins with http:// or https://"
            raise urllib.error.HTTPError(req.full_url, code, said, headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetched(url: str) -> bytes:
    """Return the first MAX_BYTES + 1 bytes behind a URL. Raises TimeoutError after FETCH_S, and urllib's errors."""
    end, parts, left = time.monotonic() + FETCH_S, list[bytes](), MAX_BYTES + 1
    # Like browsers, this takes addresses with spaces and letters beyond ASCII.
    address, opener = quote(url, safe=string.punctuation), urllib.request.build_opener(_OnlyWeb)
    try:
        with opener.open(address, timeout=FETCH_S) as source:
            while left and (part := source.read1(min(left, 1 << 20))):
                parts.append(part)
                left -= len(part)
                if time.monotonic() > end:  # A server that sends a byte now and then would hold up the rollouts.
                    raise TimeoutError(f"it takes more than {FETCH_S:g} s")
    except urllib.error.HTTPError as error:
        error.close()  # It holds the connection.
        raise
    return b"".join(parts)


def picture_of(value: Any, place: str, *, folder: Path | None, allow_urls: bool) -> Picture:
    """Return the picture that a value of a data set stands for. Raises BadPicture for anything else.

    folder: where relative paths begin; None refuses all paths, for values that do not come from the run's own data.
    """
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path")
        # In a data set with embedded pictures, `path` is only the name that the file once had.
        return picture_of(path if data is None else data, place, folder=folder, allow_urls=allow_urls)
    if isinstance(value, bytes | bytearray | memoryview) and len(value):
        return Picture(place, data=bytes(value))
    if isinstance(value, np.ndarray) or (hasattr(value, "save") and hasattr(value, "getexif")):
        return Picture(place, data=_encoded(value, place))
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise BadPicture(f"{place}: got {value!r:.80}, {_EXPECTED}")
    if value.lower().startswith("data:"):
        return Picture(place, data=_data_of(value, place))
    if is_url(value):
        if not allow_urls:
            raise BadPicture(f"{place}: got the URL {value!r:.80}, expected none (data.images.allow_urls=false)")
        return Picture(place, address=value)
    path = value.removeprefix("file://").removeprefix("file:")
    if folder is None or "://" in path:
        expected = "bytes, a PIL image, an array of pixels or a data URI" if folder is None else "a data URI or a path"
        raise BadPicture(f"{place}: got {value!r:.80}, expected {expected}")
    return Picture(place, address=str(folder / os.path.expanduser(path)))


def _encoded(image: Any, place: str) -> bytes:
    """Return a PIL image or an array as a file without loss. Raises BadPicture, naming the place, if that fails."""
    import PIL.Image  # It is installed where pictures are enabled.

    target, kind = io.BytesIO(), "array" if isinstance(image, np.ndarray) else "PIL image"
    try:
        image = PIL.Image.fromarray(image) if isinstance(image, np.ndarray) else image
        upright_rgb(image).save(target, format="PNG", compress_level=1)
    except Exception as error:  # A PIL image can be a damaged file that is decoded only now.
        raise BadPicture(f"{place}: the {kind} cannot be read: {error}") from error
    return target.getvalue()


def upright_rgb(image: Any) -> Any:
    """Return a PIL image as RGB, turned as its EXIF data says. Raises BadPicture if its numbers are no brightnesses."""
    import PIL.Image  # It is installed where a PIL image comes from.
    import PIL.ImageOps

    has_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if image.mode in ("I", "F") and not has_16_bits:
        raise BadPicture(f"it has mode {image.mode!r}, whose numbers have no largest value, expected 8 or 16 bits")
    image = PIL.ImageOps.exif_transpose(image)
    if has_16_bits:  # PIL would make everything above 255 white.
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _data_of(uri: str, place: str) -> bytes:
    """Return the content of a data URI. Raises BadPicture if it is none of a picture."""
    head, comma, body = uri[5:].partition(",")
    kind, *options = head.lower().split(";")
    if not comma or not kind.startswith("image/"):
        raise BadPicture(f"{place}: got a data URI that begins with {uri[:40]!r}, expected `data:image/...;base64,...`")
    try:
        data = unquote_to_bytes(body)
        if "base64" in options:  # Some encoders break lines.
            data = base64.b64decode(b"".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadPicture(f"{place}: the base64 text of the data URI is damaged: {error}") from None
    if not data:
        raise BadPicture(f"{place}: got an empty data URI, expected a picture")
    return data


PICTURE_TYPES = ("image", "image_url")
"""Types of the parts of a chat message that are pictures, and keys of these parts that have a picture."""
TAG = "<image>"
"""Text in whose place data sets for verl and LLaVA show a picture of the column."""
OTHER_TYPES = ("video", "video_url", "audio", "input_audio", "audio_url")
"""Types of parts that no row can have yet."""


@dataclass(frozen=True, slots=True)
class Illustrated:
    """A prompt of a data set, apart from its pictures."""

    prompt: str | list[Mapping[str, Any]]
    """Text, or chat messages in which `{"type": "image"}` stands for each picture."""
    pictures: tuple[Picture, ...]
    """The pictures, in the order in which they stand in the prompt."""


def take_pictures(
    prompt: str | list[Mapping[str, Any]], column: Any, place: str, *, folder: Path | None, allow_urls: bool
) -> Illustrated:
    """Take the pictures out of a prompt. column: the pictures beside the prompt, one or a list; None if there are none.

    Parts of the messages without a picture of their own take those of the column, in order; in texts, TAG can be in
    the place of such parts. Raises BadPicture, naming the place, if a value is no picture, or if these parts and the
    pictures of the column differ in number.
    """
    given = [] if column is None else list(column) if isinstance(column, list | tuple) else [column]
    if isinstance(prompt, str):
        values, messages = given, prompt
    else:
        messages, found = pictures_in(_without_tags(prompt, len(given)), place)
        values = filled(found, given, f"{place}: the messages have", "the row has {} beside them")
    named = (f"{place}, picture {number}" for number in range(len(values)))
    pictures = [
        picture_of(v, name, folder=folder, allow_urls=allow_urls) for v, name in zip(values, named, strict=True)
    ]
    return Illustrated(messages, tuple(pictures))


def parts_of(text: str, count: int) -> list[Mapping[str, Any]]:
    """Return the parts of a message with a text and `count` pictures. They stand where the text has TAG, if it has one
    for each of them, else first."""
    pieces = text.split(TAG)
    if len(pieces) != count + 1:
        return [*[{"type": "image"}] * count, {"type": "text", "text": text}]
    first, *rest = ([{"type": "text", "text": piece}] if piece else [] for piece in pieces)
    return [*first, *(part for after in rest for part in ({"type": "image"}, *after))]


def _without_tags(messages: list[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return chat messages with parts of type image in place of TAG, if these are texts with `count` of them."""
    texts = [message.get("content") or "" for message in messages]
    if not all(isinstance(text, str) for text in texts) or sum(text.count(TAG) for text in texts) != count:
        return messages
    return [
        {**one, "content": parts_of(text, text.count(TAG))} if TAG in text else one
        for one, text in zip(messages, texts, strict=True)
    ]


def pictures_in(messages: Iterable[Mapping[str, Any]], place: str) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Return chat messages and their pictures, in order; None for a part without a picture of its own. In the messages,
    `{"type": "image"}` stands for each picture. Raises BadPicture, naming the place, for videos and recordings."""
    plain: list[Mapping[str, Any]] = []
    values: list[Any] = []
    for message in messages:
        content, parts = message.get("content"), list[Any]()
        for part in content if isinstance(content, list) else ():
            value, is_picture = _value_of(part, place)
            values += [value] if is_picture else []
            # A data set gives all parts the same keys, and templates look for the key `image` in each.
            parts.append({"type": "image"} if is_picture else {k: v for k, v in part.items() if v is not None})
        plain.append({**message, "content": parts} if isinstance(content, list) else message)
    return plain, values


def filled(values: Sequence[T | None], given: Sequence[T], where: str, which: str) -> list[T]:
    """Return values with those that are given in place of None, in order. Raises BadPicture, which begins with `where`
    and has the count in `which`, if these differ in number."""
    empty, rest = sum(value is None for value in values), iter(given)
    if empty != len(given):
        raise BadPicture(
            f"{where} {counted(empty, 'part')} of type image without a picture, but "
            f"{which.format(counted(len(given), 'picture'))}, expected one for each"
        )
    return [next(rest) if value is None else value for value in values]


def _value_of(part: Mapping[str, Any], place: str) -> tuple[Any, bool]:
    """Return the picture that a part of a message has, or None, and whether the part is a picture."""
    kind = part["type"]
    if kind in OTHER_TYPES:
        raise BadPicture(f"{place}: got a part of type {kind!r}, expected text and pictures")
    if kind not in PICTURE_TYPES:
        if any(part.get(key) is not None for key in PICTURE_TYPES):
            raise BadPicture(
                f"{place}: got a part of type {kind!r} with a picture, expected the type image or image_url"
            )
        return None, False
    value = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    if isinstance(value, Mapping) and "url" in value:  # This is OpenAI's form.
        value = value["url"]
    return value, True
