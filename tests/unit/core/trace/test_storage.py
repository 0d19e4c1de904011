"""Memory without a value: known from its allocation until as many bytes were written."""

from __future__ import annotations

import torch

from megatron.core.trace.storage import UnwrittenStorage


def test_writes_add_up_over_views():
    storage, x = UnwrittenStorage(), torch.empty(8)
    storage.allocated(x)
    assert storage.holds(x)
    assert storage.holds(x[2:4])
    storage.written(x[:5])
    assert storage.holds(x)
    storage.written([x[5:]])
    assert not storage.holds(x)


def test_results_of_operations_have_a_value():
    storage, x = UnwrittenStorage(), torch.empty(8)
    storage.allocated(x)
    storage.made({"x": x})
    assert not storage.holds(x)
    storage.allocated([x])
    storage.clear()
    assert not storage.holds(x)


def test_empty_tensors_hold_nothing():
    storage, x = UnwrittenStorage(), torch.empty(0)
    storage.allocated(x)
    assert not storage.holds(x)
