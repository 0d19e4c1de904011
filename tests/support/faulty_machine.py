"""pretrain_hybrid.py on a machine that flips one bit once, in the result of the ``FLIP``-th RMS norm of the process.

``-m MODULE`` runs a module as Python does.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from collections.abc import Callable

import torch

from megatron.core.ops.registry import OpTable, build_table
from megatron.training.loop import build
from tests.support.planted import change_memory, with_op


def faulty(*args: object) -> OpTable:
    """``build_table`` with the fault."""
    calls = itertools.count(1)

    def make(original: Callable) -> Callable:
        def rms_norm(*given: object) -> torch.Tensor:
            out = original(*given)
            if next(calls) == int(os.environ["FLIP"]):
                change_memory(out, out.numel() // 2)
            return out

        return rms_norm

    return with_op(build_table(*args), "rms_norm", make)


if __name__ == "__main__":
    build.build_table = faulty
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
