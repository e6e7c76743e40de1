"""Divides the seconds of a train step among the families of its kernels, from a profile by torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

FAMILIES: dict[str, str] = {
    "nccl": r"nccl|c10d|all_reduce|reduce_scatter|all_gather|all_to_all|gloo",
    "optimizer": r"adam|multi_tensor_apply|foreach|lpnorm_cleanup",
    "attention": r"flash|fmha|attention|attn|mha",
    "vocabulary": r"softmax|nll|cross_entropy|logsumexp|vocab",
    "experts": r"grouped_mm|groupproblem|grouped_gemm|group_gemm|expert",
    "matmul": r"gemm|nvjet|cutlass|cublas|xmma|gemv|splitk|aten::(mm|addmm|bmm|baddbmm|matmul|linear)",
    "norm": r"rms|norm",
    "copy": r"memcpy|memset|copy|cat_?array|catarray|fill_?functor|fillfunctor|zero_|aten::(cat|fill_|_to_copy)",
    "index": r"gather|scatter|index|embedding|sort|radix|topk",
}
"""Family of kernels -> pattern that is searched in a kernel's name. The patterns are tried in this order. A kernel that
matches none is `other`; most of these are elementwise kernels."""
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in FAMILIES.items()}


def family_of(name: str) -> str:
    """Return the family of the kernel (on a CPU, of the operator) with this name."""
    return next((family for family, pattern in _PATTERNS.items() if pattern.search(name)), "other")


def profiled(step: Callable[[], Any], device: torch.device) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Run `step` under torch's profiler. Returns the seconds of each family and of `idle`, in which the device ran
    nothing, and the names and seconds of the ten kernels that took longest. On a CPU, operators take the place of
    kernels, and `idle` is the rest of the step.
    """
    gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        with torch.profiler.record_function("headrace_step"):
            step()
        if gpu:
            torch.cuda.synchronize(device)
    spans = _kernel_spans(profiler) if gpu else _operator_spans(profiler)
    return divided(spans)


def _kernel_spans(profiler: profile) -> list[tuple[str, float, float]]:
    """Return the name, the start and the end of each kernel and copy on the GPU, in seconds."""
    found = []
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            found.append((event.name, event.time_range.start / 1e6, event.time_range.end / 1e6))
    return found


def _operator_spans(profiler: profile) -> list[tuple[str, float, float]]:
    """Return one span for each operator's own time, laid end to end, and an empty span at the end of the step."""
    found, clock, whole = [], 0.0, 0.0
    for event in profiler.events() or ():
        if event.name == "headrace_step":
            whole = event.cpu_time_total / 1e6
            continue
        found.append((event.name, clock, clock + event.self_cpu_time_total / 1e6))
        clock = found[-1][2]
    return [*found, ("", max(clock, whole), max(clock, whole))]


def divided(spans: Iterable[tuple[str, float, float]]) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Return the seconds of each family and of `idle`, and the names and seconds of the ten kernels that took longest.

    spans: name, start and end of each kernel in seconds. Time in which several kernels run counts only for the kernel
    that began first, so that all families and `idle` add up to the time from the first start to the last end.
    """
    families, names = dict.fromkeys((*FAMILIES, "other", "idle"), 0.0), dict[str, float]()
    reached: float | None = None
    for name, start, end in sorted(spans, key=lambda span: span[1:]):
        if reached is None:
            reached = start
        families["idle"] += max(0.0, start - reached)
        own = max(0.0, end - max(start, reached))
        if name:
            families[family_of(name)] += own
            names[name] = names.get(name, 0.0) + own
        reached = max(reached, end)
    longest = sorted(names.items(), key=lambda item: -item[1])[:10]
    return families, longest
