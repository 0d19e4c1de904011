"""The global batch size as a function of the samples consumed so far; pure."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from megatron.core.config.numbers import shortened, whole_number

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Steps of the batch size: (first consumed sample, samples of a global batch), the first at 0, ascending.

    A step that starts at ``c`` consumed samples has the size of the last entry at or before ``c``. What a step holds
    depends on ``c`` alone, so a resumed run goes on as if it had never stopped.
    """

    steps: tuple[tuple[int, int], ...]

    @property
    def last(self) -> int:
        """The size the run ends with."""
        return self.steps[-1][1]

    def at(self, consumed: int) -> int:
        """Samples of the step that starts at ``consumed`` samples."""
        return self.steps[bisect.bisect_right(self.steps, consumed, key=lambda step: step[0]) - 1][1]

    def after(self, consumed: int, iterations: int) -> int:
        """Samples consumed after ``iterations`` steps from ``consumed`` on."""
        for number, (_, size) in enumerate(self.steps):
            if iterations and (number + 1 == len(self.steps) or consumed < self.steps[number + 1][0]):
                taken = iterations
                if number + 1 < len(self.steps):
                    taken = min(iterations, -(-(self.steps[number + 1][0] - consumed) // size))
                consumed, iterations = consumed + taken * size, iterations - taken
        return consumed

    def iterations(self, samples: int) -> int:
        """Whole steps that ``samples`` samples from the start on are enough for."""
        consumed = taken = 0
        for number, (_, size) in enumerate(self.steps):
            left = samples - consumed
            if number + 1 < len(self.steps):
                left = min(left, size * max(0, -(-(self.steps[number + 1][0] - consumed) // size)))
            consumed, taken = consumed + left // size * size, taken + left // size
            if samples - consumed < size and self.at(consumed) == size:
                break
        return taken


def parse_schedule(text: str, sequence_length: int) -> BatchSizes:
    """Sizes from Megatron's "THRESHOLD:SIZE ...": thresholds in tokens, with K, M, B or T for powers of a thousand.

    A threshold becomes the number of whole sequences in it.

    Raises:
        ValueError: not of this form, no entry at 0, or thresholds that do not ascend.
    """
    steps = []
    for word in text.split():
        threshold, _, size_text = word.partition(":")
        unit = _UNITS.get(threshold[-1:].upper(), 1)
        count, size = whole_number(threshold[:-1] if unit > 1 else threshold), whole_number(size_text)
        if count is None or size is None or count < 0 or size < 1:
            raise ValueError(f"{shortened(word)} is not THRESHOLD:SIZE")
        steps.append((count * unit // sequence_length, size))
    if not steps or text.split()[0].partition(":")[0] != "0":
        raise ValueError("the first threshold is not 0")
    if any(low >= high for (low, _), (high, _) in zip(steps, steps[1:], strict=False)):
        raise ValueError("thresholds do not ascend, or two are less than a sequence apart")
    return BatchSizes(tuple(steps))


def ramp_up(start: int, increment: int, samples: int, size: int) -> BatchSizes:
    """Sizes that grow from ``start`` to ``size`` by ``increment``, in equal parts of the first ``samples`` samples.

    Raises:
        ValueError: a number is out of range, or ``increment`` does not lead from ``start`` to ``size``.
    """
    if start < 1 or increment < 1 or samples < 1 or size <= start or (size - start) % increment:
        raise ValueError(f"steps of {increment} do not lead from {start} to {size} within {samples} samples")
    parts = (size - start) // increment
    return BatchSizes(tuple((-(-part * samples // parts), start + part * increment) for part in range(parts + 1)))
