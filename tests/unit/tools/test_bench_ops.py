"""The yardsticks beside a memory-bound op's time: copies of known size, with times that are written down."""

from __future__ import annotations

import pytest
import torch

from tools.bench import ops
from tools.bench.ops import COLUMNS, LARGE_COPY_BYTES, WIDTHS, copy_run, line, yardsticks


@pytest.mark.parametrize("moved", [0.0, 2.0, 10.0 * 33 * 7])
def test_a_copy_reads_and_writes_half_of_the_bytes_each(moved: float):
    run = copy_run(moved, torch.device("cpu"))
    (source,) = run.args
    there = run()
    assert there.data_ptr() != source.data_ptr() or not moved
    assert source.nbytes + there.nbytes == moved
    source.fill_(7)
    assert torch.equal(run(), source)


def test_shares_of_a_copy_of_the_same_size_and_of_a_large_one(monkeypatch):
    sizes: list[float] = []
    monkeypatch.setattr(ops, "copy_run", lambda moved, device: sizes.append(moved))
    monkeypatch.setattr(ops, "median_ms", lambda run: 0.03)
    found = yardsticks(LARGE_COPY_BYTES / 100, 0.04, 2.0)
    assert sizes == [LARGE_COPY_BYTES / 100]
    # A hundredth of the bytes would take 0.02 ms at the large copy's rate: small copies are slower too.
    assert found == {"copy ms": "0.030", "of copy": "75%", "of large": "50%"}


def test_no_yardstick_where_no_bytes_are_counted(monkeypatch):
    monkeypatch.setattr(ops, "median_ms", lambda run: pytest.fail("timed"))
    assert set(yardsticks(0.0, 0.04, 2.0).values()) == {""}


def test_every_column_has_a_width():
    assert len(COLUMNS) == len(WIDTHS)
    assert set(yardsticks(0.0, 1.0, 1.0)) < set(COLUMNS)
    assert line(list(COLUMNS)).split() == " ".join(COLUMNS).split()
