"""Ranges of a stored tensor, wherever they were cut; work on parts of it in order, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron.core.config.errors import DamagedInputError
from megatron.core.digest.bits import same_bits
from megatron.core.dist_checkpointing import stored
from megatron.core.dist_checkpointing.stored import AT_ONCE_BYTES, StoredCheckpoint, in_order, lots
from tests.unit.core.dist_checkpointing.test_save_and_load import save, whole

KEY = "main_params.layer.weight"


def test_any_range_is_read_across_the_places_where_it_was_cut(tmp_path: Path) -> None:
    checkpoint = StoredCheckpoint(save(tmp_path, 4, None, 1024, 4024))
    assert [(span.begin, span.numel, span.nbytes) for span in checkpoint.spans(KEY)] == [
        (0, 1024, 4096),
        (1024, 1976, 7904),
        (3000, 1024, 4096),
        (4024, 1976, 7904),
    ]
    assert same_bits(checkpoint.values(KEY), whole())
    for start, end in ((0, 1), (1023, 1025), (1024, 3000), (500, 5999), (6000, 6000)):
        out = torch.empty(end - start)
        checkpoint.read(KEY, out, start)
        assert same_bits(out, whole()[start:end]), (start, end)


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    checkpoint = StoredCheckpoint(save(tmp_path))
    with pytest.raises(DamagedInputError, match=r"\.metadata has no tensor main_params.other"):
        checkpoint.spans("main_params.other")


def test_lots_are_all_bytes_once() -> None:
    assert [*lots(0)] == []
    assert [*lots(2 * AT_ONCE_BYTES + 3)] == [
        (0, AT_ONCE_BYTES),
        (AT_ONCE_BYTES, AT_ONCE_BYTES),
        (2 * AT_ONCE_BYTES, 3),
    ]


def test_results_come_in_order_and_few_items_are_taken_up_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "THREADS", 2)
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(100):
            taken.append(item)
            yield item

    with ThreadPoolExecutor(2) as pool:
        for number, result in enumerate(in_order(pool, lambda item: item * item, items())):
            assert result == number**2
            assert len(taken) <= number + 10
        with pytest.raises(ZeroDivisionError):
            list(in_order(pool, lambda item: 1 // item, [1, 0, 1]))
    assert number == 99
