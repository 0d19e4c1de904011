"""The definition of ``digest_rows``."""

from __future__ import annotations

import torch

from megatron.core.ops.digest_words.definition import FIRST, ROW, mix, position_keys
from megatron.core.ops.registry import Guarantee, Variant


def digest_rows(words_RK: torch.Tensor, length: int, splits: int) -> torch.Tensor:
    """Partial sums over rows of int64 words: int64 ``[2, runs * splits]`` for runs of ``length`` rows, each in
    ``splits`` equal parts (the last ones short or empty).

    The first line sums the rows without their order, the second with it. A row is the wrapping sum of its words, each
    mixed with its place in the row; it is mixed once more, on the second line with its number.
    """
    rows, width = words_RK.shape
    runs, part = -(-rows // length), -(-length // splits)
    places = torch.arange(width, device=words_RK.device)
    row_R = mix(words_RK ^ position_keys(places), FIRST).sum(1)
    lines = torch.stack((mix(row_R, ROW), mix(row_R + position_keys(torch.arange(rows, device=row_R.device)), ROW)))
    by_run = torch.nn.functional.pad(lines, (0, runs * length - rows)).view(2, runs, length)
    return torch.nn.functional.pad(by_run, (0, splits * part - length)).view(2, runs * splits, part).sum(2)


VARIANT = Variant(
    name="reference",
    fn=digest_rows,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="Wrapping sums of integers are exact in any order.",
    sources=("megatron.core.ops.digest_words.definition",),
)
