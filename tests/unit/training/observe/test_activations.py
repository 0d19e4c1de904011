"""The estimate of activations against what autograd really keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.contracts.batch import Microbatch
from megatron.core.models.hybrid.hybrid_model import build_hybrid_chunks
from megatron.training.observe.activations import (
    ActivationShape,
    head_bytes,
    in_flight_chunks,
    layer_bytes,
    prediction_bytes,
)
from tests.support.ranks import groups_for_test
from tests.support.tiny import VOCAB_SIZE, attach_main_grads, tiny_batch, tiny_config, tiny_context

LENGTH, SIZE = 256, 2


class FlashLike(torch.autograd.Function):
    """Stands for an attention that keeps inputs, result and log-sums; the values do not matter here."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q)
        ctx.save_for_backward(q, k, v, out, torch.zeros(q.shape[:-1]))
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return dout, None, None


def kept_bytes(pattern: str, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that the forward pass of a small model keeps, weights left out, and the estimate of them."""
    config = tiny_config(
        hybrid_layer_pattern=pattern,
        mtp_num_layers=pattern.count("/"),
        bf16=dtype == torch.bfloat16,
        seq_length=LENGTH,
        max_position_embeddings=LENGTH,
    )
    (chunk,) = build_hybrid_chunks(config, tiny_context(groups_for_test(), dtype=dtype), VOCAB_SIZE)
    for module in chunk.modules():
        if hasattr(module, "_attention"):
            module._attention = lambda q, k, v, scale: FlashLike.apply(q, k, v)
    weights = {param.untyped_storage().data_ptr() for param in attach_main_grads([chunk])}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # keeps the storage alive, so that no address is used twice
        return tensor

    batch = tiny_batch(0, 0, size=SIZE, seq_length=LENGTH)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        chunk(batch, None, Microbatch(iteration=1, shard=0, index=0, num_microbatches=1))
    shape = ActivationShape(tokens=LENGTH * SIZE, tp=1, etp=1, cuts_sequence=False, activation_bytes=dtype.itemsize)
    main, *depths = pattern.split("/")
    estimate = sum(layer_bytes(symbol, config, shape) for symbol in main) + head_bytes(config, VOCAB_SIZE, shape)
    estimate += sum(prediction_bytes(depth, config, VOCAB_SIZE, shape) for depth in depths)
    gradient_of_logits = LENGTH * SIZE * VOCAB_SIZE * dtype.itemsize
    return sum(storage.nbytes() for storage in kept.values()), estimate - gradient_of_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("pattern", "least"), [("-", 0.95), ("*", 0.95), ("E", 0.95), ("M", 0.7), ("ME*EM-", 0.8), ("-/-/-", 0.9)]
)
def test_estimate_is_what_autograd_keeps(pattern: str, least: float, dtype: torch.dtype) -> None:
    """The CPU's mixer ops keep copies of their strided inputs and the states of chunks, which the GPU's do not."""
    kept, estimate = kept_bytes(pattern, dtype)
    assert least <= estimate / kept <= 1.05


def test_tensor_parallel_ranks_share_the_activations() -> None:
    config = tiny_config()
    shapes = {tp: ActivationShape(tokens=512, tp=tp, etp=1, cuts_sequence=tp > 1, activation_bytes=2) for tp in (1, 2)}
    for symbol in "M*-E":
        assert layer_bytes(symbol, config, shapes[2]) == pytest.approx(layer_bytes(symbol, config, shapes[1]) / 2)


@pytest.mark.parametrize(
    ("rank", "pp", "vpp", "num_microbatches", "expected"),
    [(0, 1, 1, 4, 1), (0, 4, 1, 8, 4), (3, 4, 1, 8, 1), (0, 4, 1, 2, 2), (0, 2, 2, 8, 5), (1, 2, 2, 8, 3)],
)
def test_passes_in_flight(rank: int, pp: int, vpp: int, num_microbatches: int, expected: int) -> None:
    assert in_flight_chunks(rank, pp, vpp, num_microbatches) == expected
