"""Torch's switches of deterministic mode, set once: after parsing, before the model and before CUDA is used.

The environment half, which has to act before torch is loaded, is ``pinned_environment.py``.
"""

from __future__ import annotations

import torch

from megatron.core.config.numerics import NumericsConfig
from megatron.core.ops.registry import Guarantee
from megatron.core.process_groups.float_sum_guard import refuse_float_sums


def pin_arithmetic(numerics: NumericsConfig) -> None:
    """Make torch keep the promise of deterministic mode, or raise where it cannot; nothing without that mode.

    * operations without a deterministic form raise instead of running;
    * no search for fast convolutions by timing;
    * fp32 products in fp32 (no TF32), bf16 products summed in fp32;
    * one BLAS library, not a choice per shape;
    * one thread per operation on the CPU: the cut of a sum over threads would follow the number of cores;
    * sums over ranks of floating-point numbers by ``ordered_reduce`` alone: a backend asked for one raises (not where
      the fastest of everything was asked for, which sums that way).

    Filling uninitialised memory is switched off: it costs a pass over every buffer and no result here reads one.
    """
    if not numerics.deterministic_mode:
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if torch.cuda.is_available():
        torch.backends.cuda.preferred_blas_library("cublas")
    torch.set_num_threads(1)
    if numerics.op_variants != "fastest":
        refuse_float_sums()


def switches() -> dict[str, object]:
    """The switches as they stand, for the run's manifest."""
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "matmul_allow_bf16_reduced_precision": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cpu_threads": torch.get_num_threads(),
    }


def kept_promise(numerics: NumericsConfig, weakest: Guarantee) -> str:
    """Name of what a run promises: the weakest guarantee among its ops, nothing where torch's switches are not set."""
    return (weakest if numerics.deterministic_mode else Guarantee.NONE).name
