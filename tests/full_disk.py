"""Makes writes fail half done, as they do on a full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Context manager in which a file cannot become larger than `num_bytes`. A write beyond it takes what has room, and
    the next one raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
