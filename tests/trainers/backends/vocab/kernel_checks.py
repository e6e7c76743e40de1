"""Compares the Triton kernels of the vocabulary with torch; as a program, in Triton's interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from headrace.trainers.backends.vocab import logprobs


def check_kernels(device: str) -> int:
    """Compare values and gradients in both precisions, with and without entropies. Returns the number of checks."""
    from headrace.trainers.backends.vocab import kernels  # needs Triton

    generator = torch.Generator().manual_seed(0)
    cases = list(itertools.product((torch.float32, torch.bfloat16), (False, True)))
    for dtype, with_entropy in cases:
        wide = (torch.randn(3, 5100, generator=generator) * 3).to(dtype).to(device)
        logits, targets = wide[:, :5001], torch.randint(0, 5001, (3,), generator=generator).to(device)
        theirs = logprobs.softmax_sums(logits, targets, 0.7, with_entropy=with_entropy)
        ours = kernels.softmax_sums(logits, targets, 0.7, with_entropy=with_entropy)
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        log_totals, _, entropies = theirs
        of_logprobs, more = torch.randn(2, 3, generator=generator).to(device)
        rest, given = wide[:, 5001:].clone(), (targets, 0.7, log_totals, of_logprobs, entropies)
        wanted = logprobs.softmax_gradient(logits.clone(), *given, more if with_entropy else None)
        got = kernels.softmax_gradient(logits, *given, more if with_entropy else None)
        bounds: dict[str, Any] = (
            {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
        )
        torch.testing.assert_close(got, wanted, **bounds)
        assert torch.equal(wide[:, 5001:], rest), "only the row's own logits are written"
    return len(cases)


if __name__ == "__main__":
    print(f"{check_kernels('cpu')} checks")
