"""Every op that promises to repeat its bits on a GPU, in fresh processes, with work on other streams: the same bytes.

Each op has a process of its own, and in it every case has five replays, memory that nobody wrote holds NaN, and rows of
the launch table are put in force for all sizes (tests/support/op_leg.py). With one connection to the device streams may
wait for one another; what was printed says whether they could still get in the way.
"""

from __future__ import annotations

import pytest

from tests.support.op_leg import PLANTS, replayable
from tests.support.op_legs import differing, run_legs, seen_planted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1300)]


def test_fresh_processes_have_the_same_bits_under_contention() -> None:
    ops = sorted({op.spec.name for op, _ in replayable("cuda")})
    plain = run_legs("cuda", ops, CUDA_DEVICE_MAX_CONNECTIONS="8")
    single = run_legs("cuda", ops, CUDA_DEVICE_MAX_CONNECTIONS="1")
    planted = run_legs("cuda", sorted(PLANTS), "planted")
    can = "can" if single["can_contend"] else "cannot"
    print(f"\n{len(plain['digests'])} cases; with one connection other streams {can} get in the way")
    assert plain["can_contend"], "work on other streams was not beside what was replayed"
    assert {name.partition("=")[0] for name in plain["digests"]} == set(ops)
    assert plain["changing"] == [] and single["changing"] == []
    assert differing([plain, single]) == []
    of_planted = {name: digest for name, digest in plain["digests"].items() if name.partition("=")[0] in PLANTS}
    assert seen_planted({"digests": of_planted}, planted)
