"""Tests that every kernel of a step is counted once, in the family that its name tells."""

from __future__ import annotations

import pytest
import torch

from headrace.bench.train_steps.families import FAMILIES, divided, family_of, profiled

KERNELS = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "matmul",
    "void cutlass::device_kernel<flash::enable_sm90<FlashAttnFwdSm90>>": "attention",
    "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "attention",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "void (anonymous namespace)::cunn_SoftMaxForward<4, float>": "vocabulary",
    "triton_red_fused__to_copy_vocab_logsumexp_0": "vocabulary",
    "ncclDevKernel_AllGather_RING_LL": "nccl",
    "void at::native::vectorized_layer_norm_kernel": "norm",
    "Memcpy HtoD (Pinned -> Device)": "copy",
    "void at::native::indexFuncLargeIndex": "index",
    "void at::native::vectorized_elementwise_kernel<4, silu>": "other",
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernels_name_tells_its_family(name: str) -> None:
    assert family_of(name) == KERNELS[name]


def test_kernels_side_by_side_count_once_and_gaps_are_idle() -> None:
    families, longest = divided([("ncclX", 0.5, 2.0), ("gemm", 0.0, 1.0), ("gemm", 3.0, 4.0), ("copyX", 3.2, 3.5)])
    assert families["matmul"] == 2.0 and families["nccl"] == 1.0 and families["copy"] == 0.0
    assert families["idle"] == 1.0 and sum(families.values()) == 4.0
    assert longest[0] == ("gemm", 2.0)
    assert sum(divided([])[0].values()) == 0.0


def test_a_step_on_a_cpu_is_profiled() -> None:
    a = torch.randn(64, 64)
    families, longest = profiled(lambda: torch.softmax(a @ a, -1).sum(), torch.device("cpu"))
    assert families["matmul"] > 0 and families["vocabulary"] > 0 and set(families) == {*FAMILIES, "other", "idle"}
    assert any("mm" in name for name, _ in longest)
