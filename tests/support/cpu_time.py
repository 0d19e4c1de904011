"""What child processes cost, for tests of how quick something is."""

from __future__ import annotations

import resource


def cpu_of_children_s() -> float:
    """Seconds of CPU that child processes which have ended had; unlike the clock no busy machine stretches it much."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
