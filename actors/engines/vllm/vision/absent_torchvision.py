"""Lets vLLM load its models with pictures where torchvision is not installed.

vLLM's files of these models, and transformers' files of their processors, import functions of torchvision with which
they would preprocess pictures. No torchvision fits the torch for CPUs that package indexes have.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformers.utils.import_utils import is_torchvision_available

NAME = "torchvision"


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Context manager in which files that import torchvision can be loaded although it is not installed.

    What they import does nothing, and must not be called. If torchvision is installed, the context has no effect.
    """
    if is_torchvision_available():  # The answer is kept, so transformers does not take the modules below for it.
        yield
        return
    finder = _Nothing()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]


class _Nothing(MetaPathFinder, Loader):
    """Finds a module without content for each module of torchvision."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != NAME:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _nothing


def _nothing(name: str) -> Any:
    """Return what stands for `name` of a module: a class, because some are base classes or types of arguments."""
    if name.startswith("__"):  # Python and libraries ask for these to learn what a module is.
        raise AttributeError(name)
    return type(name, (), {})
