"""The search for launch configurations, with a kernel whose times and bits are written down, and the file it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.ops.launch import Launch
from megatron.core.ops.launch_table import table_of
from tools.bench import tune
from tools.bench.shapes import Workload
from tools.bench.tune import Asked, Found, Trial, climb, line, trial_of, write_rows

PRESENT = {"BLOCK": 2, "ROWS": 1, "num_warps": 4}
LAUNCH = Launch(
    kernel="planted",
    rule=lambda *_: dict(PRESENT),
    choices={"BLOCK": (1, 2, 4), "ROWS": (1, 2), "num_warps": (4, 8)},
    new_bits=frozenset({"ROWS"}),
)


def search(times, *, changed=(), broken=(), unstable=(), trials=99, allow_new_bits=False) -> tuple[Found, list]:
    """Climb where a configuration takes ``times(BLOCK, ROWS, num_warps)``; the others are lists of such triples."""
    asked: list[tuple] = []

    def trial(config):
        at = tuple(config.values())
        asked.append(at)
        return None if at in broken else Trial(times(*at), stable=at not in unstable, same=at not in changed)

    found = climb(LAUNCH, PRESENT, trial, lambda: len(asked) >= trials, allow_new_bits=allow_new_bits)
    return found, asked


def test_two_keys_are_better_together():
    found, asked = search(lambda block, rows, warps: 10.0 - block - warps)
    assert found.best == {"BLOCK": 4, "ROWS": 1, "num_warps": 8}
    assert (found.ms, found.present_ms) == (-2.0, 4.0)
    assert all(rows == 1 for _, rows, _ in asked), "a key that changes bits was tried"
    assert len(set(asked[:-2])) == len(asked) - 2, "only the last two are measured a second time"


@pytest.mark.parametrize("gain", [0.0, 0.019])
def test_a_tie_leaves_things_as_they_are(gain: float):
    found, _ = search(lambda block, rows, warps: 1.0 - gain * (block == 4))
    assert found.best == PRESENT
    assert found.ms == found.present_ms == 1.0


def test_one_lucky_measurement_is_not_enough():
    times = iter([1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    found, _ = search(lambda *_: next(times))
    assert found.best == PRESENT


def test_bits_change_only_where_that_is_declared_and_allowed():
    times = lambda block, rows, warps: 10.0 - 2 * (block == 4) - rows  # noqa: E731
    found, _ = search(times, changed=[(4, 1, 4), (4, 2, 4), (2, 2, 4)])
    assert found.best == PRESENT
    assert found.unruly == [{**PRESENT, "BLOCK": 4}]
    found, _ = search(times, changed=[(4, 1, 4), (4, 2, 4), (2, 2, 4)], allow_new_bits=True)
    assert found.best == {"BLOCK": 4, "ROWS": 2, "num_warps": 4}
    found, _ = search(times, unstable=[(2, 2, 4), (4, 1, 4), (4, 2, 4)], allow_new_bits=True)
    assert found.best == PRESENT


def test_what_does_not_compile_costs_only_itself():
    found, _ = search(lambda block, rows, warps: 10.0 - block - warps, broken=[(4, 1, 4)])
    assert found.best == {"BLOCK": 4, "ROWS": 1, "num_warps": 8}
    assert found.failed == 1
    with pytest.raises(ValueError, match="planted does not run"):
        search(lambda *_: 1.0, broken=[tuple(PRESENT.values())])


def test_what_is_found_when_time_is_up_counts():
    times = lambda block, rows, warps: 10.0 - block - warps  # noqa: E731
    assert search(times, trials=1)[0].best == PRESENT
    assert search(times, trials=3)[0].best == {**PRESENT, "BLOCK": 4}


def test_rows_are_merged_in_order_and_the_file_is_whole(tmp_path: Path):
    out = tmp_path / "table.json"
    write_rows(out, {("b", "H200", (4, 2)): {"BLOCK": 1}, ("a", "H200", (16,)): {"BLOCK": 2}})
    write_rows(out, {("a", "H200", (2,)): {"BLOCK": 3}, ("b", "H200", (4, 2)): {"BLOCK": 9}})
    rows = table_of(out.read_text())
    assert list(rows) == [("a", "H200", (2,)), ("a", "H200", (16,)), ("b", "H200", (4, 2))]
    assert rows["b", "H200", (4, 2)] == {"BLOCK": 9}
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_the_rows_that_are_asked_for_are_noted():
    table = Asked({("a", "", (1,)): {"BLOCK": 1}})
    assert table.get(("a", "", (1,))) == {"BLOCK": 1}
    assert table.get(("b", "", (1,))) is None
    assert table.keys_asked == [("a", "", (1,)), ("b", "", (1,))]


def test_a_trial_runs_with_the_row_and_leaves_the_table_as_it_was(monkeypatch):
    monkeypatch.setattr(tune, "median_ms", lambda run: float(run()[0]))
    key, total = ("planted", "H200", ()), torch.zeros(3)
    table = Asked({})

    def run() -> tuple:
        block = (table.get(key) or PRESENT)["BLOCK"]
        if block == 4:
            raise RuntimeError("out of registers")
        total.add_(1.0)
        return (torch.full((1,), float(block)),)

    trial = trial_of(table, key, Workload(label="planted", args=(total,)), run)
    assert trial(PRESENT) == Trial(2.0)
    assert total.tolist() == [2.0] * 3, "each replay starts from the same arguments; one more run is timed"
    assert trial({**PRESENT, "BLOCK": 1}) == Trial(1.0, same=False)
    assert trial({**PRESENT, "BLOCK": 4}) is None
    assert dict(table) == {}
    table[key] = PRESENT
    assert trial({**PRESENT, "num_warps": 8}) == Trial(2.0)
    assert table[key] == PRESENT


def test_report_names_what_changed():
    found = Found(PRESENT, {**PRESENT, "BLOCK": 4}, 0.5, 1.0, tried=3, failed=1)
    assert "BLOCK=4 (3 tried, 1 failed)" in line(("planted", "H200", (8,)), found)
