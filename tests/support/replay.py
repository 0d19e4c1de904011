"""One training step of a block, a stack or the whole model, made again and again in one process from one state.

Every replay starts from restored weights, masters, moments, expert biases and generators, and is disturbed in another
way: late ranks on a CPU, work on other streams on a GPU. What is compared is every tensor that a module put out or got
a gradient for, the final gradients, and the state behind the optimizer's step.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.config.numerics import NumericsConfig
from megatron.core.config.optimizer import DistributedDataParallelConfig, OptimizerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.contracts.parameter import ModelParameter
from megatron.core.contracts.stage import BalancedRouter
from megatron.core.digest.bits import same_bits
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.models.hybrid.hybrid_block import HybridLayer, LayerStack
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import build_hybrid_chunks
from megatron.core.optimizer.distrib_optimizer import Optimizer
from megatron.core.pipeline_parallel.execute import PipelineInput, run_pipeline
from megatron.core.process_groups.groups import ProcessGroups, create_process_groups
from megatron.core.process_groups.ordered_reduce import OrderedSums
from megatron.core.process_groups.topology import plan_topology
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.setup.determinism import pin_arithmetic
from megatron.training.setup.seeds import generator_states, restore_generators
from tests.support.delays import delay_collectives
from tests.support.planted import with_op
from tests.support.tiny import SEED, VOCAB_SIZE, tiny_batch, tiny_config, tiny_context

NOISE = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_input_jitter_eps": 0.1}
MODEL = "model"
MICROBATCHES, SIZE, REPLAYS = 2, 2, 3
Recorded = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks share what; ``pattern`` is the model's, with its pipes."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False
    pattern: str = "ME*EM-"
    sharded: bool = True

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp * self.pp

    @property
    def subjects(self) -> tuple[str, ...]:
        """Every kind of block, a stack of them, and the model with embedding, head and loss; over a pipeline the model
        only."""
        return (*dict.fromkeys(self.pattern), self.pattern, MODEL) if self.pp == 1 else (MODEL,)

    def __str__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "pattern"}
        shown["vpp"] = (self.pattern.count("|") + 1) // self.pp
        parts = [f"{name}{value}" for name, value in shown.items() if value not in (1, None, False, True)]
        return "-".join([*parts, *(["sp"] if self.sequence_parallel else [])]) or "one"


class Part(torch.nn.Module):
    """A block or a stack as a chunk of its own."""

    is_first = is_last = True

    def __init__(self, symbols: str, context: ModelContext, **changes: Any) -> None:
        super().__init__()
        config = tiny_config(hybrid_layer_pattern=symbols, **changes)
        if len(symbols) == 1:
            self.inner = HybridLayer("decoder.layers.0", 0, hybrid_stack_spec[symbols], config, context)
        else:
            self.inner = LayerStack("decoder", symbols, config, context, hybrid_stack_spec, first_key=0, first_layer=0)

    def model_parameters(self) -> Iterator[ModelParameter]:
        """As ``Stage.model_parameters``."""
        yield from (p for p in self.parameters() if isinstance(p, ModelParameter))

    def balanced_routers(self) -> Iterator[BalancedRouter]:
        """As ``Stage.balanced_routers``."""
        yield from (m for m in self.modules() if isinstance(m, TopKRouter) and m.has_bias)


class Replayed:
    """A subject with its engine on this rank."""

    def __init__(self, subject: str, layout: Layout, groups: ProcessGroups, context: ModelContext, seq: int) -> None:
        self.subject, self.groups, self.context, self.seq = subject, groups, context, seq
        sizes = {"seq_length": seq, "max_position_embeddings": seq, **NOISE}
        if subject == MODEL:
            config = tiny_config(hybrid_layer_pattern=layout.pattern, **sizes)
            self.chunks: Sequence = build_hybrid_chunks(config, context, VOCAB_SIZE)
        else:
            self.chunks = [Part(subject, context, **sizes)]
        self.ddp = DistributedDataParallel(
            self.chunks, DistributedDataParallelConfig(), groups=groups, sums=context.sums, layout=context.layout
        )
        settings = OptimizerConfig(lr=0.01, weight_decay=0.1, use_distributed_optimizer=layout.sharded)
        self.optimizer = Optimizer(self.ddp.buffers, settings, groups=groups, ops=context.ops, seed=SEED)

    def state(self) -> Recorded:
        """Everything that a step leaves to the next one, as the live tensors."""
        found = [(f"weights {n}", buffer.weights) for n, buffer in enumerate(self.ddp.buffers)]
        for n, state in enumerate(self.optimizer.states):
            found += [(f"{kind} {n}", flat) for kind, flat in state.tensors().items()]
        for router in (r for chunk in self.chunks for r in chunk.balanced_routers()):
            found += [("expert bias", router.expert_bias_E), ("expert counts", router.token_counts_E)]
        return found

    def step(self, iteration: int, disturb: Callable[[], None]) -> Recorded:
        """Forward, backward, reduction, optimizer; what was seen. Inputs are drawn from torch's generators."""
        recorded: Recorded = []
        handles = list(self._watch(recorded, disturb))
        self.ddp.zero_grad_buffer()
        if self.subject == MODEL:
            self._run_model(iteration, recorded)
        else:
            for index in range(MICROBATCHES):
                self._run_part(iteration, index)
        self.ddp.finalize_model_grads()
        for n, buffer in enumerate(self.ddp.buffers):
            for span in buffer.owned:
                recorded.append((f"gradient {n}", buffer.grad[span.start : span.stop].clone()))
        outcome = self.optimizer.step(lr=0.01, weight_decay=0.1, iteration=iteration)
        recorded.append(("norm", torch.tensor(outcome.grad_norm, dtype=torch.float64)))
        recorded += [(f"state: {name}", live.clone()) for name, live in self.state()]
        for handle in handles:
            handle.remove()
        return recorded

    def _microbatch(self, iteration: int, index: int) -> Microbatch:
        return Microbatch(iteration=iteration, shard=self.groups.dp.rank, index=index, num_microbatches=MICROBATCHES)

    def _run_part(self, iteration: int, index: int) -> None:
        ranks = self.groups.tp.size if self.context.cuts_sequence else 1
        shape = (self.seq, SIZE, 64)
        # Drawn whole on every rank, like a user's own noise would be.
        x_SBH, grad_SBH = (torch.randn(shape).to(self.context.params_dtype) for _ in range(2))
        mine = slice(self.groups.tp.rank * self.seq // ranks, (self.groups.tp.rank + 1) * self.seq // ranks)
        if ranks == 1:
            mine = slice(None)
        x_SBH = x_SBH[mine].to(self.groups.device).contiguous().requires_grad_()
        out_SBH = self.chunks[0].inner(x_SBH, self._microbatch(iteration, index), StageReport())
        out_SBH.backward(grad_SBH[mine].to(self.groups.device))

    def _run_model(self, iteration: int, recorded: Recorded) -> None:
        start = int(torch.randint(0, 1000, ()))
        given = PipelineInput(
            iteration=iteration,
            shards=(self.groups.dp.rank,),
            num_microbatches=MICROBATCHES,
            micro_batch_size=SIZE,
            seq_length=self.seq,
            batch=lambda shard, index: tiny_batch(
                start + shard, index, size=SIZE, seq_length=self.seq, device=self.groups.device
            ),
            end_pass=self.ddp.end_pass,
        )
        for place, report in sorted(run_pipeline(self.chunks, self.groups, given).items()):
            if report.loss_sum is not None:
                recorded.append((f"loss {place}", report.loss_sum.clone()))

    def _watch(self, recorded: Recorded, disturb: Callable[[], None]) -> Iterator[Any]:
        """Hooks on every module: what it puts out, and the gradient that comes back to that."""

        def hook(name: str) -> Callable[..., None]:
            def after(module: torch.nn.Module, given: Any, out: Any) -> None:
                disturb()
                for value in out if isinstance(out, tuple) else (out,):
                    if isinstance(value, torch.Tensor):
                        recorded.append((f"{name} forward", value.detach().clone()))
                        if value.requires_grad:
                            value.register_hook(lambda grad: recorded.append((f"{name} backward", grad.clone())))

            return after

        for number, chunk in enumerate(self.chunks):
            for name, module in chunk.named_modules():
                yield module.register_forward_hook(hook(f"{number}:{name}"))


class SideStreams:
    """Products and copies on other streams of the device, a random number at every call, to get in the way."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._draw = random.Random(seed)
        self._factors = torch.randn(1024, 1024, device=device)
        self._streams = [(torch.cuda.Stream(device), torch.empty_like(self._factors)) for _ in range(3)]
        torch.cuda.synchronize(device)

    def __call__(self) -> None:
        """More work for the other streams."""
        for stream, product in self._streams:
            with torch.cuda.stream(stream):
                for _ in range(self._draw.randrange(4)):
                    torch.mm(self._factors, self._factors, out=product)
                    product.copy_(self._factors)


def other_order(linear_grad: Callable[..., None], turned: list[bool]) -> Callable[..., None]:
    """The control: a weight gradient whose rows are added from the last to the first while ``turned`` says so."""

    def grad(main_grad_YX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor) -> None:
        if turned[0]:
            dy_RY, x_RX = dy_RY.flip(0), x_RX.flip(0)
        linear_grad(main_grad_YX, dy_RY, x_RX)

    return grad


Found = dict[str, dict[str, int]]


def replay(layout: Layout, dtypes: Sequence[torch.dtype], device_type: str = "cpu", seq: int = 16) -> list[Found]:
    """Rank function: by type and subject, how many tensors were compared and which differed, by name; under
    ``planted: ...`` the same for a step whose weight gradients are added in another order, under ``generators: ...``
    for one that starts from generators that were not restored."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    pin_arithmetic(NumericsConfig(deterministic_mode=True))
    topology = plan_topology(world=layout.world, tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=layout.etp)
    groups = create_process_groups(topology, device)
    return [_all_subjects(layout, groups, dtype, seq, rank) for dtype in dtypes]


def _all_subjects(layout: Layout, groups: ProcessGroups, dtype: torch.dtype, seq: int, rank: int) -> Found:
    context = tiny_context(groups, sequence_parallel=layout.sequence_parallel, dtype=dtype, micro_batch_size=SIZE)
    turned = [False]
    ops = with_op(context.ops, "linear_grad", lambda fn: other_order(fn, turned))
    context = dataclasses.replace(context, ops=ops, sums=OrderedSums(ops["blocked_fold"]))
    found: Found = {}
    for subject in layout.subjects:
        found |= _replays(subject, Replayed(subject, layout, groups, context, seq), turned, rank)
    return found


def _replays(subject: str, run: Replayed, turned: list[bool], rank: int) -> Found:
    seed = 77 + run.groups.dp.rank
    random.seed(seed)
    torch.manual_seed(seed)
    run.step(1, lambda: None)  # moments and biases that are not zero
    kept = [(live, live.clone()) for _, live in run.state()]
    count, generators = run.optimizer.step_count, generator_states()

    def again(number: int, *, restored: bool = True) -> Recorded:
        for live, value in kept:
            live.copy_(value)
        run.optimizer.step_count = count
        if restored:
            restore_generators(generators)
        disturb = SideStreams(number, run.groups.device) if number and run.groups.device.type == "cuda" else _nothing
        end = delay_collectives(number, rank) if number else _nothing
        try:
            return run.step(2, disturb)
        finally:
            end()

    first = again(0)
    found: Found = {subject: {"compared": len(first)}}
    for number in range(1, REPLAYS):
        _note(found[subject], first, again(number))
    turned[0] = True
    found[f"planted: {subject}"] = _note({}, first, again(0))
    turned[0] = False
    found[f"generators: {subject}"] = _note({}, first, again(0, restored=False))
    return found


def _nothing() -> None:
    """Nobody gets in the way."""


def _note(differing: dict[str, int], first: Recorded, other: Recorded) -> dict[str, int]:
    if [name for name, _ in first] != [name for name, _ in other]:
        differing["another sequence of modules"] = 1
    for (name, a), (_, b) in zip(first, other, strict=False):
        if not same_bits(a, b):
            differing[name] = differing.get(name, 0) + 1
    return differing
