"""What a profiled GPU did: union of intervals, exposed communication, groups; names of our own kernels."""

from __future__ import annotations

import pytest

from megatron.training.observe.kernel_groups import Interval, covered, group_of, intervals_of, own_kernels, summary


def test_overlap_counts_once():
    assert covered([]) == 0
    assert covered([Interval("a", 5, 9), Interval("b", 0, 6), Interval("c", 1, 2), Interval("d", 20, 21)]) == 10


def test_only_what_ran_on_the_gpu_is_taken_from_a_trace():
    events = [
        {"cat": "kernel", "name": "k", "ts": 1.5, "dur": 2.0},
        {"cat": "gpu_memset", "name": "m", "ts": 4, "dur": 1},
        {"cat": "gpu_user_annotation", "name": "step", "ts": 0, "dur": 100},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1},
        {"ph": "M", "name": "process_name"},
    ]
    assert intervals_of({"traceEvents": events}) == [Interval("k", 1.5, 3.5), Interval("m", 4, 5)]


def test_communication_is_exposed_where_nothing_else_runs():
    talking = Interval("ncclDevKernel_SendRecv", 0, 4e6)
    found = summary([talking, Interval("nvjet_tst_128x256", 1e6, 2e6), Interval("nvjet_tst_128x256", 5e6, 6e6)], 2, {})
    assert (found["busy_s"], found["communication_s"], found["exposed_communication_s"]) == (2.5, 2.0, 1.5)
    assert found["launches"] == 1.5
    assert found["groups"] == {
        "communication": {"seconds": 2.0, "launches": 0.5},
        "gemm": {"seconds": 1.0, "launches": 1.0},
    }
    assert [kernel["name"] for kernel in found["kernels"]] == ["ncclDevKernel_SendRecv", "nvjet_tst_128x256"]


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GemmUniversal>>", "gemm"),
        ("_chunk_scan_fwd_kernel", "ssd"),
        ("chunk_scan_fwd_kernel", "ssd"),
        ("adam_tiles_kernel", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "copy, fill"),
        ("Memcpy DtoD (Device -> Device)", "copy, fill"),
        ("void at::native::elementwise_kernel<128, 4, add>", "elementwise, reduce"),
        ("blocked_fold_kernel", "ordered sum"),
        ("something", "other"),
    ],
)
def test_group_of_a_kernel(kernel: str, group: str):
    assert group_of(kernel, own_kernels()) == group
