"""The whole model on one GPU: near the CPU in fp32, the same bits twice, no host generator or unordered op involved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.models.hybrid.hybrid_model import build_hybrid_chunks
from megatron.core.process_groups.groups import create_process_groups
from megatron.core.process_groups.topology import plan_topology
from tests.support.tiny import (
    VOCAB_SIZE,
    attach_main_grads,
    relative_error,
    run_microbatches,
    tiny_config,
    tiny_context,
)

NOISE = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_input_jitter_eps": 0.1}
LEARNED = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "add_bias_linear": True,
    "squared_relu": False,
    "moe_shared_expert_intermediate_size": None,
}


def _step(device: str, dtype: torch.dtype, changes: dict[str, Any]) -> tuple[dict, dict[str, torch.Tensor]]:
    groups = create_process_groups(plan_topology(world=1), torch.device(device))
    chunks = build_hybrid_chunks(tiny_config(**changes), tiny_context(groups, dtype=dtype), VOCAB_SIZE)
    params = attach_main_grads(chunks)
    losses, _ = run_microbatches(chunks, [(0, 0), (0, 1)], 2, 2)
    return losses, {p.spec.name: p.main_grads[0].cpu() for p in params}


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, NOISE, LEARNED, {"swiglu": True, "squared_relu": False}], ids=str)
def test_agrees_with_the_cpu(changes: dict[str, Any]) -> None:
    losses, grads = _step("cuda", torch.float32, changes)
    want_losses, want = _step("cpu", torch.float32, changes)
    for place, (loss, tokens) in losses.items():
        assert loss == pytest.approx(want_losses[place][0], rel=1e-5)
        assert tokens == want_losses[place][1]
    wrong = {name: error for name in want if not (error := relative_error(grads[name], want[name])) <= 1e-4}
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [NOISE, {**LEARNED, **NOISE}], ids=["rms", "layer norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_repeats_bit_for_bit(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True)
    (losses, first), (again, second) = (_step("cuda", dtype, changes) for _ in range(2))
    assert losses == again
    assert all(same_bits(first[name], grad) for name, grad in second.items())
