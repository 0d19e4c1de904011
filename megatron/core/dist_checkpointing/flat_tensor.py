"""One stored tensor as a rank sees it: a flat key of the whole, and the ranges of it that this rank holds.

PyTorch DCP asks a tensor for its chunks through methods of the tensor; a plain object with these methods fails in its
planners, so ``FlatTensor`` is a tensor subclass without storage of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.digest.bits import digest_hex
from megatron.core.dist_checkpointing.host_digest import digest_on_host
from megatron.core.ops.digest_pieces.definition import digest_of_words, shard_key, words_of, words_per_element


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFacts:
    """What is known of one stored tensor besides its values.

    Attributes:
        dtype: torch's name without ``torch.``, e.g. ``float32``.
        shape: shape of the tensor that the model means; the stored one is flat.
        shards: number of equal logical shards that follow one another in the flat tensor.
        name: the name that digests are keyed by: of a parameter's state the parameter's, else the key.
    """

    dtype: str
    shape: tuple[int, ...]
    shards: int
    name: str

    @classmethod
    def stated(cls, facts: Mapping[str, Any]) -> TensorFacts:
        """What ``metadata.json`` says of a tensor."""
        return cls(dtype=facts["dtype"], shape=tuple(facts["shape"]), shards=facts["shards"], name=facts["name"])

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return torch.Size(self.shape).numel()

    @property
    def torch_dtype(self) -> torch.dtype:
        """torch's type of that name."""
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def shard_numel(self) -> int:
        """Elements of one logical shard."""
        return self.numel // self.shards


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPiece:
    """Elements ``begin ...`` of the flat tensor ``key``, inside one logical shard, as a 1-D view.

    ``copy`` is 0 for what is written. Ranks may hold the same elsewhere: pieces of one other number, of all ranks, are
    the whole tensor once more.
    """

    key: str
    facts: TensorFacts
    begin: int
    values: torch.Tensor
    copy: int = 0

    @property
    def written(self) -> bool:
        """Whether a save writes it."""
        return self.copy == 0


def plain_piece(key: str, values: torch.Tensor, *, copy: int = 0) -> StoredPiece:
    """A tensor that one rank holds whole."""
    facts = TensorFacts(dtype=dtype_name(values.dtype), shape=tuple(values.shape), shards=1, name=key)
    return StoredPiece(key=key, facts=facts, begin=0, values=values.view(-1), copy=copy)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


class FlatTensor(torch.Tensor):
    """The flat tensor of ``size`` elements, of which ``chunks`` (begin, 1-D values) are here."""

    chunks: Sequence[tuple[int, torch.Tensor]]

    @staticmethod
    def __new__(cls, size: int, chunks: Sequence[tuple[int, torch.Tensor]]) -> FlatTensor:
        self = torch.Tensor._make_wrapper_subclass(cls, (size,), dtype=chunks[0][1].dtype, device="cpu")
        self.chunks = chunks
        return self

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Planners may detach the tensor; everything else would need values that are not here."""
        if function is torch.ops.aten.detach.default:
            return FlatTensor(args[0].numel(), args[0].chunks)
        raise TypeError(f"{function} on a tensor of which only some ranges are here")

    def __create_write_items__(self, fqn: str, tensor: torch.Tensor) -> list[WriteItem]:  # noqa: N807 (DCP's name)
        """What to write."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size([begin]), i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size([begin]), sizes=values.size()),
                    properties=TensorProperties(dtype=values.dtype),
                    size=self.size(),
                ),
            )
            for i, (begin, values) in enumerate(self.chunks)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # noqa: N807 (DCP's name)
        """What to read."""
        return [ChunkStorageMetadata(offsets=torch.Size([b]), sizes=v.size()) for b, v in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:  # noqa: N807 (DCP's name)
        """Where the values of one chunk are."""
        return next(values for begin, values in self.chunks if (begin,) == index.offset)


def state_dict_of(pieces: Iterable[StoredPiece]) -> dict[str, torch.Tensor]:
    """The pieces as DCP takes them: one ``FlatTensor`` per key, keys sorted, chunks ascending."""
    by_key: dict[str, list[StoredPiece]] = {}
    for piece in pieces:
        by_key.setdefault(piece.key, []).append(piece)
    return {
        key: FlatTensor(mine[0].facts.numel, sorted(((p.begin, p.values) for p in mine), key=lambda chunk: chunk[0]))
        for key, mine in sorted(by_key.items())
    }


def digests_of(pieces: Iterable[StoredPiece]) -> dict[str, list[int]]:
    """Layout-free digest of what the pieces hold, by key, as two integers; to be added over all ranks."""
    # Pieces of one place have the same keys: a parameter's master and moments.
    places: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
    for piece in pieces:
        shard, start = divmod(piece.begin, piece.facts.shard_numel)
        words = words_of(piece.values.contiguous())
        place = (shard_key(piece.facts.name, shard), start * words_per_element(piece.values.dtype))
        places.setdefault((*place, words.numel(), words.dtype, words.device), []).append((piece.key, words))
    totals: dict[str, torch.Tensor] = {}
    for (key, start, _, _, device), together in places.items():
        digest = digest_on_host if device.type == "cpu" else digest_of_words
        for (name, _), lanes in zip(together, digest([words for _, words in together], key, start), strict=True):
            totals[name] = lanes if name not in totals else totals[name] + lanes
    if not totals:
        return {}
    values = torch.stack([total.cpu() for total in totals.values()]).tolist()
    return dict(zip(totals, values, strict=True))


def add_digests(parts: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, str]:
    """The digests of whole tensors, in hex, from those of every rank's pieces."""
    totals: dict[str, list[int]] = {}
    for part in parts:
        for key, lanes in part.items():
            total = totals.setdefault(key, [0] * len(lanes))
            totals[key] = [a + b for a, b in zip(total, lanes, strict=True)]
    return {key: digest_hex(lanes) for key, lanes in sorted(totals.items())}
