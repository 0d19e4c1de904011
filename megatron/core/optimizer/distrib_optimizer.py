"""Optimizer: steps on fp32 masters, whole on every rank or cut over the data-parallel ranks; the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.contracts.flat_buffer import FlatBuffer, Piece
from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.ops.registry import OpTable
from megatron.core.optimizer.clip_grads import Measured, clip_factor, counts_here, measure, stop_not_finite
from megatron.core.optimizer.shard_plan import plan_runs
from megatron.core.optimizer.sharded_state import ShardedState
from megatron.core.optimizer.state_digests import WEIGHTS, Digests, StateDigests, Written, piece_digest
from megatron.core.optimizer.state_kinds import MAIN_PARAMS, MOMENTS
from megatron.core.optimizer.update_rules import update_rule
from megatron.core.process_groups.collectives import sum_integers
from megatron.core.process_groups.groups import ProcessGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What a step measured; equal on all ranks.

    ``grad_norm`` is the global norm before clipping, ``num_zeros`` the number of exactly zero gradient elements where
    it was asked for.
    """

    grad_norm: float
    clip_factor: float
    num_zeros: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePiece:
    """Consecutive elements ``start ...`` of one logical shard of one state tensor, as a view that can be filled.

    ``kind`` is ``main_params``, ``exp_avg`` or ``exp_avg_sq``; ``name`` the parameter's global name. Of the pieces that
    ranks own, ``counted`` ones hold every logical element once over the world.
    """

    kind: str
    name: str
    spec: ParamSpec
    counted: bool
    shard: int
    start: int
    values: torch.Tensor


class Optimizer:
    """Masters and moments of this rank's buffers.

    ``step_count`` is the number of steps taken, exact; a step that was not taken does not count. After a step
    ``gather`` gives every rank the working weights of all (default: buffer by buffer, complete when it returns).

    Raises:
        ValueError: the working weights are not the initial values of ``seed``.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        config: OptimizerConfig,
        *,
        groups: ProcessGroups,
        ops: OpTable,
        seed: int,
        gather: Callable[[], None] | None = None,
    ) -> None:
        self.buffers, self.config, self.groups = tuple(buffers), config, groups
        moments = MOMENTS[config.optimizer]
        self.states = tuple(ShardedState(b, config.use_distributed_optimizer, seed, moments) for b in self.buffers)
        self._digested = (WEIGHTS, MAIN_PARAMS, *moments)
        self.step_count = 0
        self.written: Written = None
        self._gather = gather or self._gather_weights
        self._update, self._norm_blocks = update_rule(config, ops), ops["norm_blocks"]
        self.held_digests = StateDigests(
            self.states,
            ops["digest_pieces"],
            lambda spec: counts_here(spec, self.groups),
            kinds=self._digested[1:],
            device=groups.device,
        )
        self._counted_runs = tuple(
            (state, [r for span in state.buffer.owned for r in plan_runs(span, self._counts) if r.fact])
            for state in self.states
        )

    def _counts(self, piece: Piece) -> bool:
        return counts_here(piece.spec, self.groups)

    def counted_pieces(self) -> Iterator[tuple[ShardedState, Piece]]:
        """Every logical element of the model once over all ranks."""
        for state in self.states:
            for span in state.buffer.owned:
                yield from ((state, piece) for piece in span.pieces if self._counts(piece))

    def measured(self, *, count_zeros: bool = False) -> Measured:
        """Norm of the final gradient and what else a step asks of it; call it on all ranks."""
        zeros_of = (state.buffer.grad[p.offset : p.stop] for state, p in self.counted_pieces())
        return measure(
            (state.buffer.grad[run.start : run.stop] for state, runs in self._counted_runs for run in runs),
            self._norm_blocks,
            self.groups,
            zeros_of=zeros_of if count_zeros else None,
            extremes=[ends for buffer in self.buffers for ends in buffer.local_extremes],
        )

    def step(
        self,
        *,
        lr: float,
        weight_decay: float,
        iteration: int,
        count_zeros: bool = False,
        digest: bool = False,
        digest_grad: bool = False,
    ) -> StepOutcome:
        """Clip by the global norm, one step of the masters, new working weights.

        Call it on all ranks once the owned spans hold the final gradient. With ``digest`` the optimizer, where
        it can, makes the digests of what it writes as it writes: ``written``, for ``digests_of_step``; with
        ``digest_grad`` also of the gradient it reads.

        Raises:
            TrainingStoppedError: the gradient is not finite somewhere; on all ranks together, before anything changed.
        """
        measured = self.measured(count_zeros=count_zeros)
        if not measured.finite:
            stop_not_finite(self.buffers, self.groups, iteration)
        factor = clip_factor(measured.norm, self.config.clip_grad)
        self.step_count += 1
        written = []
        for state in self.states:
            if not state.distributed:
                state.buffer.gather_grads()
            written.append(
                self._update(
                    state,
                    lr=lr,
                    weight_decay=weight_decay,
                    clip_factor=factor,
                    step=self.step_count,
                    digest=digest,
                    digest_grad=digest_grad,
                )
            )
        complete = [found for found in written if found is not None]
        self.written = complete if digest and len(complete) == len(written) else None
        if self.config.use_distributed_optimizer:
            self._gather()
        return StepOutcome(grad_norm=measured.norm, clip_factor=factor, num_zeros=measured.num_zeros)

    def write_working_weights(self) -> None:
        """Derive all working weights from the masters; to be called after the masters were filled."""
        for state in self.states:
            state.write_working_weights()
        if self.config.use_distributed_optimizer:
            self._gather_weights()

    def _gather_weights(self) -> None:
        for buffer in self.buffers:
            buffer.gather_weights()

    def params_norm(self) -> float:
        """Global norm of the masters, each logical element once; equal on all ranks and layouts."""
        flats = (
            state.view(state.main_params, run.start, run.stop) for state, runs in self._counted_runs for run in runs
        )
        return measure(flats, self._norm_blocks, self.groups).norm

    def owned_pieces(self) -> Iterator[StatePiece]:
        """Masters and moments that this rank owns, whether or not it holds more, by logical shard; without padding.
        After the values of all ranks' pieces were replaced, ``complete_state`` brings everything else in line."""
        for state in self.states:
            owned = [piece for span in state.buffer.owned for piece in span.pieces]
            for kind, flat in state.tensors().items():
                for piece in owned:
                    yield StatePiece(
                        kind=kind,
                        name=piece.spec.name,
                        spec=piece.spec,
                        counted=self._counts(piece),
                        shard=piece.shard,
                        start=piece.start,
                        values=state.view(flat, piece.offset, piece.stop),
                    )

    def complete_state(self) -> None:
        """From the owned pieces to the whole state of every rank: copies of masters and moments, working weights.

        Call it on all ranks.
        """
        for state in self.states:
            state.share()
        self.write_working_weights()

    def weights_unlike_masters(self) -> list[str]:
        """Parameters whose working weights, on this rank, are not the owners' masters rounded once; call it on all
        ranks. The masters' cast is digested by its owners and the weights by everyone who holds them."""
        wrong = []
        for state in self.states:
            buffer, device = state.buffer, self.groups.device
            names = [piece.spec.name for span in buffer.whole for piece in span.pieces]
            rows = {name: i for i, name in enumerate(dict.fromkeys(names))}
            cast, held = (torch.zeros(len(rows), 2, dtype=torch.int64, device=device) for _ in range(2))
            for piece in (piece for span in buffer.owned for piece in span.pieces):
                masters = state.view(state.main_params, piece.offset, piece.stop).to(buffer.weights.dtype)
                cast[rows[piece.spec.name]] += piece_digest(piece, masters)
            for piece in (piece for span in buffer.whole for piece in span.pieces):
                held[rows[piece.spec.name]] += piece_digest(piece, buffer.weights[piece.offset : piece.stop])
            expert = any(piece.spec.expert for span in buffer.whole for piece in span.pieces)
            total = sum_integers(self.groups.edp if expert else self.groups.dp, cast)
            unequal = (total != held).any(dim=1).tolist()
            wrong += [name for name, row in rows.items() if unequal[row]]
        return wrong

    def digests_of_step(self) -> tuple[Digests, Digests]:
        """``state_digests`` and ``local_digests`` of what the last step wrote, or, where it made none, from one reading
        of the state; call it on all ranks, before anything else changes the state."""
        written, self.written = self.written, None
        return self._digests(written)

    def _digests(self, written: Written) -> tuple[Digests, Digests]:
        mine, held = self.held_digests.totals(written)
        totals = sum_integers(self.groups.world, torch.stack([mine[kind] for kind in self._digested]))
        return dict(zip(self._digested, totals, strict=True)), {kind: held[kind] for kind in self._digested}

    def state_digests(self) -> Digests:
        """Layout-free digest (int64 ``[2]``) of working weights, masters and moments, each logical element once over
        the world; equal on all ranks and layouts. Call it on all ranks; nothing waits for the device."""
        return self._digests(None)[0]

    def local_digests(self) -> Digests:
        """The same of everything this rank holds, copies included and not summed over ranks: ranks that should hold
        copies of one another have equal ones."""
        held = self.held_digests.totals()[1]
        return {kind: held[kind] for kind in self._digested}
