"""Torch's switches of deterministic mode as a table: what each is set to, and why. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """One switch: ``read`` and ``write`` are names under ``torch``, of an attribute or of a function without and with
    one argument. ``write`` is left out where it is the attribute read. ``cuda`` switches exist with a GPU only."""

    name: str
    value: bool | int | str
    why: str
    read: str
    write: str = ""
    cuda: bool = False


SWITCHES = (
    Switch(
        name="deterministic_algorithms",
        value=True,
        read="are_deterministic_algorithms_enabled",
        write="use_deterministic_algorithms",
        why="an operation of torch's without a deterministic form raises instead of running",
    ),
    Switch(
        name="fill_uninitialized_memory",
        value=False,
        read="utils.deterministic.fill_uninitialized_memory",
        why="it costs a pass over every buffer, and no result reads uninitialised memory",
    ),
    Switch(
        name="cudnn_benchmark",
        value=False,
        read="backends.cudnn.benchmark",
        why="no choice of a convolution by timing",
    ),
    Switch(
        name="cudnn_deterministic",
        value=True,
        read="backends.cudnn.deterministic",
        why="only convolutions that repeat",
    ),
    # The general switch comes before the one for CUDA: torch refuses to read the first once the second disagrees.
    Switch(
        name="float32_matmul_precision",
        value="highest",
        read="get_float32_matmul_precision",
        write="set_float32_matmul_precision",
        why="fp32 products in fp32 on every device: no TF32, no bf16 passes",
    ),
    Switch(
        name="matmul_allow_tf32",
        value=False,
        read="backends.cuda.matmul.allow_tf32",
        why="fp32 products of cuBLAS in fp32",
    ),
    Switch(
        name="cudnn_allow_tf32",
        value=False,
        read="backends.cudnn.allow_tf32",
        why="fp32 convolutions in fp32",
    ),
    Switch(
        name="matmul_allow_fp16_reduced_precision",
        value=False,
        read="backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        why="fp16 products are summed in fp32, also where a product is split",
    ),
    Switch(
        name="matmul_allow_bf16_reduced_precision",
        value=False,
        read="backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        why="bf16 products are summed in fp32, also where a product is split",
    ),
    Switch(
        name="matmul_allow_fp16_accumulation",
        value=False,
        read="backends.cuda.matmul.allow_fp16_accumulation",
        why="sums inside a product are fp32",
    ),
    Switch(
        name="blas_library",
        value="cublas",
        read="backends.cuda.preferred_blas_library",
        write="backends.cuda.preferred_blas_library",
        cuda=True,
        why="one BLAS library, not a choice per shape",
    ),
    Switch(
        name="cpu_threads",
        value=1,
        read="get_num_threads",
        write="set_num_threads",
        why="the cut of a sum over threads would follow the number of cores",
    ),
)
"""In the order in which they are set."""
