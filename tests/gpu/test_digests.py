"""Digests made on the GPU, by kernels and on several streams, are those of the host."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.digest_rows import OP as DIGEST_ROWS
from megatron.core.ops.digest_words import OP as DIGEST_WORDS
from megatron.core.trace import tensor_digest
from megatron.core.trace.tensor_digest import Digester
from tests.support.digests import texts

SHAPES = [(1,), (7,), (3, 5), (4096, 33), (70_000,), (129, 2688), (16, 1 << 17)]
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def tensors() -> list[torch.Tensor]:
    """Values of every type and shape, a transposed one and one that starts at an odd place."""
    generator = torch.Generator().manual_seed(3)
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES for dtype in DTYPES]
    return [*found, found[8].t(), found[4].to(torch.bfloat16)[1:]]


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [tensor_digest.CAPACITY, 600])
def test_digests_are_those_of_the_host(capacity: int) -> None:
    host = Digester()
    expected = [digest for t in tensors() for digest in (*host.whole([t]), host.by_row(t))]
    device = Digester(DIGEST_WORDS.variants[0].fn, DIGEST_ROWS.variants[0].fn, capacity)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(2):
        waiting = []
        for number, tensor in enumerate(tensors()):
            with torch.cuda.stream(streams[number % 2]):
                there = tensor.cuda()
                waiting += [*device.whole([there]), device.by_row(there)]
        there = [tensor.cuda() for tensor in tensors()]
        together = device.whole(there)
        adopted = device.adopt(torch.tensor([[1, -2], [3, 4]]).cuda())
        found = texts(device, [*waiting[::2], *together, *adopted], waiting[1::2])
        assert found == texts(host, [*expected[::2], *expected[::2], [1, -2], [3, 4]], expected[1::2])


@pytest.mark.gpu
def test_tensors_of_host_and_device_are_digested_together() -> None:
    host, device = Digester(), Digester(DIGEST_WORDS.variants[0].fn, DIGEST_ROWS.variants[0].fn)
    values = [torch.arange(5.0), torch.arange(9), torch.zeros(0)]
    found = device.whole([values[0], values[1].cuda(), values[2].cuda()])
    assert texts(device, found, ()) == texts(host, host.whole(values), ())
