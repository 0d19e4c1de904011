"""What is begun in a lane is complete after join, in the order it was begun; without a lane it is complete at once."""

from __future__ import annotations

import torch

from megatron.core.process_groups.collectives import Waiting
from megatron.core.process_groups.lane import Lane

CPU = torch.device("cpu")


def _seen(beside: bool) -> list[str]:
    lane, seen = Lane(CPU, beside=beside), []

    def start(name: str) -> Waiting:
        seen.append(f"start {name}")
        return lambda: seen.append(f"complete {name}")

    for name in ("a", "b"):
        lane.begin(lambda name=name: start(name))
    seen.append("join")
    lane.join()
    lane.join()
    return seen


def test_work_beside_is_completed_in_join_and_once() -> None:
    assert _seen(True) == ["start a", "start b", "join", "complete a", "complete b"]


def test_without_a_lane_each_is_complete_before_the_next_begins() -> None:
    assert _seen(False) == ["start a", "complete a", "start b", "complete b", "join"]
