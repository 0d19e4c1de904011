"""What lines of a trace say of digests."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.trace.digest_queue import Digest
from megatron.core.trace.tensor_digest import Digester


def texts(digester: Digester, wholes: Sequence[Digest], by_row: Sequence[Digest]) -> tuple[list[str], list[list[str]]]:
    """The digits of all digests that were made since they were last asked for, of whole tensors and by row."""
    sent = digester.send()
    sent.wait()
    return [sent.text(digest) for digest in wholes], [sent.texts_by_row(digest) for digest in by_row]
