"""Every op that promises to repeat its bits on a GPU, in fresh processes, with work on other streams: the same bytes.

In each process every case has five replays, memory that nobody wrote holds NaN, and rows of the launch table are put in
force for all sizes (tests/support/op_leg.py). With one connection to the device streams may wait for one another; what
was printed says whether they could still get in the way.
"""

from __future__ import annotations

import pytest

from tests.support.op_leg import replayable
from tests.support.op_legs import differing, run_leg, seen_planted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1300)]


def test_fresh_processes_have_the_same_bits_under_contention() -> None:
    plain = run_leg("cuda", CUDA_DEVICE_MAX_CONNECTIONS="8")
    single = run_leg("cuda", CUDA_DEVICE_MAX_CONNECTIONS="1")
    planted = run_leg("cuda", "planted")
    can = "can" if single["can_contend"] else "cannot"
    print(f"\n{len(plain['digests'])} cases; with one connection other streams {can} get in the way")
    assert plain["can_contend"], "work on other streams was not beside what was replayed"
    assert {name.partition("=")[0] for name in plain["digests"]} == {op.spec.name for op, _ in replayable("cuda")}
    assert plain["changing"] == [] and single["changing"] == []
    assert differing([plain, single]) == []
    assert seen_planted(plain, planted)
