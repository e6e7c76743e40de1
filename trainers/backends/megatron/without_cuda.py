"""Provides the context for calls into megatron-core: it hides known warnings and, without a GPU, replaces CUDA.

megatron-core 0.16.1 requests CUDA in many places; here it trains on CPU tensors too, for tests and laptops. Megatron's
files are not changed. Patches are active only while a call of the backend runs (`on_cpu`), so that nothing else in the
process, such as an inference engine, sees CUDA where there is none.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .library import tensor_parallel_random, token_dispatcher

CPU = torch.device("cpu")


@contextmanager
def on_cpu() -> Iterator[None]:
    """Context in which requests for CUDA use the CPU instead. May be nested.

    Device arguments of torch functions are rewritten in this thread only. Patches of single functions, such as
    `torch.cuda.current_device`, affect the whole process while the context is active.
    """
    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "empty_cache", _nothing),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "current_stream", lambda *_: _STREAM),
        (torch.cuda, "default_stream", lambda *_: _STREAM),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda.nvtx, "range_push", _nothing),
        (torch.cuda.nvtx, "range_pop", _nothing),
        # An all-to-all needs its splits as numpy arrays, but on the CPU Megatron leaves them as tensors.
        (token_dispatcher, "maybe_move_tensor_to_cpu", _to_cpu),
        # Recomputation saves and restores the CUDA generator; it handles the CPU generator anyway.
        (tensor_parallel_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (tensor_parallel_random, "_set_cuda_rng_state", _nothing),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_CpuMode())
        yield


class _CpuMode(TorchFunctionMode):
    """Makes torch functions that are called with a CUDA device use the CPU, in the thread that entered the mode."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.to and len(args) > 1 and args[1] == "cuda":
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizers tell a parameter's precision by its type's name and expect the CUDA name.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _Stream:
    """Stand-in for a CUDA stream or event. Its methods do nothing, because CPU operations are synchronous."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.wait_stream = self.wait_event = self.synchronize = self.record = self.wait = _nothing

    def record_event(self, *_: Any) -> _Stream:
        return _Stream()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _nothing(*_: Any, **__: Any) -> None:
    pass


_STREAM = _Stream()


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_KNOWN = (
    # megatron-core 0.16.1 calls collectives at every step by names that torch 2.13 has deprecated.
    r"`torch\.distributed\.\w+` is deprecated",
    # DistributedOptimizer causes this warning once.
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    r"Warning: tp_group is None, using default tp group",  # Megatron's own layers do not pass the group.
    r"MimoModelConfig is experimental",  # The optimizers of megatron-core 0.19 import this class.
    r"MLP requires ffn_hidden_size",  # Megatron's own layer spec does not pass the size.
    r"full scope is deprecated",  # TransformerConfig warns about its own default.
    # The setting is correct where experts are not split.
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
)
_KNOWN_ON_CPU = (r"When using \w+( \w+)* it is recommended to set the environment variable CUDA_",)


@contextmanager
def megatron_calls(device: torch.device) -> Iterator[None]:
    """Context that must enclose all code that runs Megatron on tensors of `device`, including backward passes.

    It hides known warnings and, when `device` is the CPU, turns Megatron's CUDA requests into CPU requests. May be
    nested.
    """
    on_host = device.type == "cpu"
    with warnings.catch_warnings(), on_cpu() if on_host else nullcontext():
        for message in (*_KNOWN, *(_KNOWN_ON_CPU if on_host else ())):
            warnings.filterwarnings("ignore", message=message)
        yield
