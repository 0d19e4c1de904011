"""What stands for a traced part of a step passes on what is set on it: a resume puts the step count there."""

from __future__ import annotations

from types import SimpleNamespace

from megatron.training.loop.tracing import _Watched


def test_what_is_set_on_a_watched_part_reaches_it():
    inner = SimpleNamespace(step_count=0, step=lambda by: by + 1)
    calls = []
    watched = _Watched(inner, step=lambda original, by: calls.append(by) or original(by))
    watched.step_count = 7
    assert (inner.step_count, watched.step_count) == (7, 7)
    assert watched.step(2) == 3
    assert calls == [2]
