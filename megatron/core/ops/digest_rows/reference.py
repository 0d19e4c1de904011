"""The definition of ``digest_rows``."""

from __future__ import annotations

import torch

from megatron.core.ops.digest_words.definition import LOW, ROW, mix, position_keys
from megatron.core.ops.registry import Guarantee, Variant


def digest_rows(words_RK: torch.Tensor, length: int, splits: int, out: torch.Tensor, first: int) -> None:
    """Partial sums over rows of 4-byte words (int32): ``runs * splits`` columns of the int64 ``[2, n]`` ``out``, from
    column ``first`` on, for runs of ``length`` rows, each in ``splits`` equal parts (the last ones short or empty).

    The first line sums the rows without their order, the second with it. A row is the wrapping sum of its words, each
    times an odd key of its place in the row; it is mixed once more, on the second line with its number.
    """
    rows, width = words_RK.shape
    runs, part = -(-rows // length), -(-length // splits)
    keys_K = position_keys(torch.arange(width, device=words_RK.device)) | 1
    row_R = ((words_RK.to(torch.int64) & LOW) * keys_K).sum(1)
    lines = torch.stack((mix(row_R, ROW), mix(row_R + position_keys(torch.arange(rows, device=row_R.device)), ROW)))
    by_run = torch.nn.functional.pad(lines, (0, runs * length - rows)).view(2, runs, length)
    parts = torch.nn.functional.pad(by_run, (0, splits * part - length)).view(2, runs * splits, part)
    out[:, first : first + runs * splits] = parts.sum(2)


VARIANT = Variant(
    name="reference",
    fn=digest_rows,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="Wrapping sums of integers are exact in any order.",
    sources=("megatron.core.ops.digest_words.definition",),
)
