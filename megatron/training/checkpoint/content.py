"""What a checkpoint holds, as pieces of flat tensors, and where each piece goes back to.

main_params.NAME, exp_avg.NAME, exp_avg_sq.NAME    fp32, logical shards one after the other
expert_bias.ROUTER, expert_token_counts.ROUTER     fp32 and int64, one number per expert
generators.rank_00003.python, ...                  uint8, one set per rank
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.core.contracts.stage import BalancedRouter, Stage
from megatron.core.dist_checkpointing.flat_tensor import StoredPiece, TensorFacts, dtype_name, plain_piece
from megatron.core.optimizer.distrib_optimizer import Optimizer, StatePiece
from megatron.core.process_groups.collectives import sum_integers
from megatron.core.process_groups.groups import ProcessGroups

MASTERS = "main_params"
MOMENTS = ("exp_avg", "exp_avg_sq")
ROUTERS = ("expert_bias", "expert_token_counts")
GENERATORS = "generators"


def parameter_pieces(optimizer: Optimizer, kinds: Sequence[str]) -> Iterator[StoredPiece]:
    """The state tensors that this rank owns, as views that can be written and filled."""
    for piece in optimizer.owned_pieces():
        if piece.kind in kinds:
            yield _stored(piece, optimizer.groups)


def _stored(piece: StatePiece, groups: ProcessGroups) -> StoredPiece:
    spec = piece.spec
    ranks = groups.etp if spec.expert else groups.tp
    # Where it is cut, the stage's ranks hold one copy together.
    holder = ranks.rank if spec.tp_replicated else 0
    facts = TensorFacts(dtype=dtype_name(piece.values.dtype), shape=spec.shape, shards=spec.num_shards, name=piece.name)
    return StoredPiece(
        key=f"{piece.kind}.{piece.name}",
        facts=facts,
        begin=piece.shard * facts.shard_numel + piece.start,
        values=piece.values,
        copy=0 if piece.counted else 1 + groups.pp.rank * ranks.size + holder,
    )


def _routers(chunks: Sequence[Stage]) -> list[BalancedRouter]:
    return [router for chunk in chunks for router in chunk.balanced_routers()]


def router_pieces_to_save(chunks: Sequence[Stage], groups: ProcessGroups) -> list[StoredPiece]:
    """Every router's bias, and its counts summed over the ranks that route with it (zero between steps); written by the
    first rank of the pipeline stage. Collective."""
    pieces = []
    for router in _routers(chunks):
        counts = sum_integers(groups.tp_dp, router.token_counts_E)
        pieces += _router_pieces(router, router.expert_bias_E, counts, groups)
    return pieces


def _router_pieces(
    router: BalancedRouter, bias_E: torch.Tensor, counts_E: torch.Tensor, groups: ProcessGroups
) -> list[StoredPiece]:
    copy = groups.tp_dp.rank
    return [
        plain_piece(f"expert_bias.{router.name}", bias_E, copy=copy),
        plain_piece(f"expert_token_counts.{router.name}", counts_E, copy=copy),
    ]


def router_pieces_to_load(chunks: Sequence[Stage], groups: ProcessGroups) -> list[StoredPiece]:
    """The same as views of this rank's routers. After filling them call ``share_router_counts``."""
    return [
        piece
        for router in _routers(chunks)
        for piece in _router_pieces(router, router.expert_bias_E, router.token_counts_E, groups)
    ]


def share_router_counts(chunks: Sequence[Stage], groups: ProcessGroups) -> None:
    """Loaded counts are sums over ranks: they stay on the first rank of the stage and are zero elsewhere."""
    if not groups.tp_dp.is_first:
        zero_router_counts(chunks)


def zero_router_counts(chunks: Sequence[Stage]) -> None:
    """No tokens counted yet."""
    for router in _routers(chunks):
        router.token_counts_E.zero_()


def generator_key(rank: int, name: str) -> str:
    """Key of one generator's state on one rank."""
    return f"{GENERATORS}.rank_{rank:05d}.{name}"


def generator_pieces(states: dict[str, torch.Tensor], rank: int) -> list[StoredPiece]:
    """This rank's generators; no two ranks share a key, whatever they hold."""
    return [plain_piece(generator_key(rank, name), values) for name, values in states.items()]
