"""The section `data.images` of the configuration: the pictures of prompts, and how they are preprocessed."""

from __future__ import annotations

from typing import Any, Literal

from ...dataplane.config import Count, CountOrZero, PathText, Section, Text

IMAGES = "images"
"""Name of the column that lists the pictures of a row, by their digests."""


class ImagesConfig(Section):
    """The pictures of prompts, which rollout actors preprocess for engines and train workers alike."""

    enabled: bool = False
    """True lets prompts have pictures. The model must then be a vision-language model."""
    field: Text | None = None
    """Name of the column with the pictures of a prompt: one picture, or a list. They fill, in order, the parts of type
    `image` of the chat messages that have no picture of their own. A data set need not have the column. Unset: `images`
    or, in rows without it, `image`."""
    folder: PathText | None = None
    """Folder that relative paths of pictures begin at. Unset: the folder of the .jsonl file, or of the data set."""
    allow_urls: bool = False
    """True lets pictures be named by http and https addresses, which the rollout actors then fetch. The author of the
    data set thereby chooses what these hosts connect to."""
    processor: PathText | None = None
    """Folder or hub id of the image processor. Unset: that of the model."""
    processor_options: dict[str, Any] = {}
    """Options of the image processor that differ from those of its file, such as `{size: {shortest_edge: 3136,
    longest_edge: 401408}}`."""
    backend: Literal["auto", "pil", "torchvision"] = "auto"
    """Library that resizes pictures. The two give slightly different pixels. `auto` is what transformers chooses, which
    is torchvision if it is installed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of pixels in the data plane. `bfloat16` halves their size. It loses nothing for a vision tower that
    computes in bfloat16."""
    workers: Count = 2
    """Number of processes beside each rollout actor that read and preprocess pictures."""
    cache_mib: CountOrZero = 256
    """Size in MiB of the preprocessed pictures that each rollout actor keeps for further prompts with the same
    pictures. The pictures of prompts in flight come on top."""
