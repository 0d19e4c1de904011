"""What is launched to prove the contract on the GPUs of one host: recipes, their layouts, and the launches of each.

A recipe fixes a logical layout, so all launches of one recipe have to be one trajectory, whatever their layout and
devices. Per layout: two launches; one that is stopped, on the devices in reverse order, and gone on with on the devices
in turn. Further launches go on from such a stop in other layouts. One takes the backend's own sums and has to differ.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = """
    --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --kv-channels 64 --mamba-num-heads 16 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8
    --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
    --seq-length 1024 --max-position-embeddings 1024 --vocab-size 4095 --bf16
"""
TINY = """
    --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --kv-channels 8 --mamba-num-heads 8 --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 8
    --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
    --seq-length 32 --max-position-embeddings 32 --vocab-size 509 --bf16 --distributed-backend gloo
"""
"""Sizes for a rehearsal on the CPU."""
SHARED = """
    --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --kv-channels 64 --mamba-num-heads 8 --mamba-head-dim 64 --mamba-state-dim 64 --mamba-num-groups 8
    --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128
    --seq-length 256 --max-position-embeddings 256 --vocab-size 1023 --bf16 --distributed-backend gloo
"""
"""Sizes for ranks that share GPUs, whose messages go through the host."""
TRAINING = """
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall
    --normalization RMSNorm --disable-bias-linear --squared-relu --untie-embeddings-and-output-weights
    --position-embedding-type none --attention-dropout 0 --hidden-dropout 0.1
    --micro-batch-size 1 --lr 1e-3 --lr-warmup-iters 2 --clip-grad 1.0 --use-distributed-optimizer
    --mock-data --num-workers 0 --tokenizer-type NullTokenizer --log-interval 1 --deterministic-mode
"""
LAYERS = "MEM*EM-E"
STAGES = {1: LAYERS, 2: "MEM*|EM-E", 4: "ME|M*|EM|-E", 8: "M|E|M|*|E|M|-|E"}
"""The layers by number of pipeline chunks."""
CONTROL_STEPS = 10
PROXY_EXPERTS, PROXY_STEPS = 128, 8
PROFILED = "--profile --use-pytorch-profiler --profile-step-start 5 --profile-step-end 6 --profile-ranks"
NATIVE_SUMS = "--op-variants float_sums=native"
TP_EP = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size {}"
)
FIRST = "first"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A logical layout; ``flags`` are those of every launch of it."""

    name: str
    flags: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a recipe runs: ranks, pipeline size and chunks, the rest in flags."""

    name: str
    recipe: Recipe
    ranks: int
    pp: int = 1
    chunks: int = 1

    @property
    def flags(self) -> str:
        """The flags of the layout."""
        pipeline = f"--pipeline-model-parallel-size {self.pp} " if self.pp > 1 else ""
        return f"{pipeline}--hybrid-layer-pattern {STAGES[self.chunks]}"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: iterations ``first`` to ``last`` of its layout on ``devices``, from the checkpoint of ``source``
    where there is one.

    ``against`` is the launch it is compared with; ``same`` whether the two have to be identical. ``saved``: whether
    others go on from it. ``proxy``: of examples/nemotron3_nano_proxy.sh instead of the small model.
    """

    layout: Layout
    role: str
    devices: tuple[int, ...]
    first: int
    last: int
    against: str | None
    source: str | None = None
    saved: bool = False
    same: bool = True
    flags: str = ""
    proxy: bool = False

    @property
    def name(self) -> str:
        """What identifies it."""
        return f"{self.layout.name}: {self.role}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The launches in the order they are to begin in, the most telling first, and what needs more GPUs."""

    launches: tuple[Launch, ...]
    left_out: tuple[str, ...]


def plan(gpus: int, steps: int, stop: int) -> Plan:
    """All launches for this many GPUs (2, 4 or 8), of ``steps`` iterations, stopped after ``stop``.

    Raises:
        ValueError: another number of GPUs, or a stop that leaves fewer than two iterations.
    """
    if gpus not in (2, 4, 8):
        raise ValueError(f"{gpus} GPUs: 2, 4 or 8")
    if not 1 <= stop <= steps - 2:
        raise ValueError(f"a stop after iteration {stop} of {steps}: 1 to {steps - 2}")
    (straight, *pipelines), others = _layouts(gpus)
    launches = [*_launches(straight, straight, steps, stop), *_shrinking(straight, steps, stop)]
    launches.append(_control(straight, stop))
    for first, *more in others:
        launches += _launches(first, first, steps, stop)
        for layout in more:
            launches += _launches(layout, first, steps, stop)
    for layout in pipelines:
        launches += _launches(layout, straight, steps, stop)
    if gpus >= 4:
        launches.append(_other_pipeline(pipelines[0], straight, steps, stop))
    return Plan(launches=tuple(launches), left_out=_left_out(gpus))


def _layouts(gpus: int) -> tuple[list[Layout], list[list[Layout]]]:
    """The layouts of the recipe that is data parallel alone, and those of the others, by recipe; a recipe's first is
    what its others are compared with."""
    widest = min(4, gpus)
    dp = gpus // widest
    ends = f", DP{dp}" if dp > 1 else ""
    batch = 4 if gpus == 2 else 8
    data = _recipe("data", ldp=max(4, gpus), batch=batch)
    straight = [Layout(name=f"DP{gpus}", recipe=data, ranks=gpus)]
    for chunks in (widest, 2 * widest):
        name = f"PP{widest}{'' if chunks == widest else 'xVPP2'}{ends}"
        straight.append(Layout(name=name, recipe=data, ranks=gpus, pp=widest, chunks=chunks))
    experts = _recipe("experts", f"--expert-model-parallel-size {gpus}", ldp=gpus, batch=batch)
    tensor = _recipe("tensor", f"--tensor-model-parallel-size {widest} --sequence-parallel", ldp=dp, batch=2 * dp)
    two = _recipe("tensor and two experts", TP_EP.format(2), ldp=2, batch=4)
    alone = [
        [Layout(name=f"EP{gpus}", recipe=experts, ranks=gpus)],
        [Layout(name=f"TP{widest}+SP{ends}", recipe=tensor, ranks=gpus)],
    ]
    if gpus < 8:
        joined = [Layout(name=f"TP2+SP, EP2{f', DP{gpus // 2}' if gpus > 2 else ''}", recipe=two, ranks=gpus)]
        if gpus == 4:
            joined.append(Layout(name="TP2xPP2xEP2", recipe=two, ranks=4, pp=2, chunks=2))
        return straight, [joined, *alone]
    four = _recipe("tensor and four experts", TP_EP.format(4), ldp=4, batch=8)
    joined = [Layout(name="TP2xPP2xEP2xDP2", recipe=two, ranks=8, pp=2, chunks=2)]
    return straight, [joined, [Layout(name="TP2+SP, EP4, DP4", recipe=four, ranks=8)], *alone]


def _recipe(name: str, parallel: str = "", *, ldp: int, batch: int) -> Recipe:
    return Recipe(name=name, flags=f"--logical-data-parallel-size {ldp} --global-batch-size {batch} {parallel}")


def _launches(layout: Layout, reference: Layout, steps: int, stop: int) -> list[Launch]:
    """Two launches, and one stopped and gone on with, each on devices in another order; the first one is compared with
    that of ``reference``."""
    devices, first = tuple(range(layout.ranks)), f"{layout.name}: {FIRST}"
    stopped = Launch(
        layout=layout, role="stopped", devices=devices[::-1], first=1, last=stop, against=first, saved=True
    )
    straight = Launch(
        layout=layout,
        role=FIRST,
        devices=devices,
        first=1,
        last=steps,
        against=None if reference == layout else f"{reference.name}: {FIRST}",
    )
    again = Launch(layout=layout, role="again", devices=devices, first=1, last=steps, against=first)
    resumed = Launch(
        layout=layout,
        role="gone on with",
        devices=(*devices[1:], 0),
        first=stop + 1,
        last=steps,
        against=first,
        source=stopped.name,
    )
    return [stopped, straight, again, resumed]


def _shrinking(straight: Layout, steps: int, stop: int) -> list[Launch]:
    """From the stop on half of the ranks, and then on half of those where there are any; on devices from the end."""
    sizes = [ranks for ranks in (straight.ranks // 2, straight.ranks // 4) if ranks]
    ends = [stop + (steps - stop) // 2, steps][-len(sizes) :]
    source, first, launches = f"{straight.name}: stopped", stop + 1, []
    for ranks, last in zip(sizes, ends, strict=True):
        layout = Layout(name=f"DP{ranks}", recipe=straight.recipe, ranks=ranks)
        launches.append(
            Launch(
                layout=layout,
                role=f"from {source.partition(':')[0]}",
                devices=tuple(range(straight.ranks))[::-1][:ranks],
                first=first,
                last=last,
                against=f"{straight.name}: {FIRST}",
                source=source,
                saved=last < steps,
            )
        )
        source, first = launches[-1].name, last + 1
    return launches


def _other_pipeline(pipeline: Layout, straight: Layout, steps: int, stop: int) -> Launch:
    """From the stop of a pipeline in one of two stages."""
    ranks = pipeline.ranks
    return Launch(
        layout=Layout(name=f"PP2, DP{ranks // 2}", recipe=pipeline.recipe, ranks=ranks, pp=2, chunks=2),
        role=f"from {pipeline.name}",
        devices=tuple(range(ranks)),
        first=stop + 1,
        last=steps,
        against=f"{straight.name}: {FIRST}",
        source=f"{pipeline.name}: stopped",
    )


def _control(straight: Layout, stop: int) -> Launch:
    """The backend's own sums over ranks, which have to be seen."""
    return Launch(
        layout=straight,
        role="the backend's sums",
        devices=tuple(range(straight.ranks)),
        first=1,
        last=min(CONTROL_STEPS, stop),
        against=f"{straight.name}: {FIRST}",
        same=False,
        flags=NATIVE_SUMS,
    )


def proxies(gpus: int, layouts: int) -> list[Launch]:
    """Two short launches each of up to two layouts of a large model; the first one is profiled for its memory."""
    size = f"--num-experts {PROXY_EXPERTS} --exit-interval {PROXY_STEPS} --expert-model-parallel-size {gpus}"
    dp = gpus // 2
    tensor = f"--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 {size}"
    recipes = {
        f"proxy, EP{gpus}, DP{gpus}": size,
        f"proxy, TP2+SP, EP{gpus}, DP{dp}": f"{tensor} --global-batch-size {4 * dp}",
    }
    ranks = " ".join(map(str, range(gpus)))
    launches = []
    for name, flags in list(recipes.items())[:layouts]:
        layout = Layout(name=name, recipe=Recipe(name=name, flags=flags), ranks=gpus)
        for role in (FIRST, "again"):
            launches.append(
                Launch(
                    layout=layout,
                    role=role,
                    devices=tuple(range(gpus)),
                    first=1,
                    last=PROXY_STEPS,
                    against=None if role == FIRST else f"{name}: {FIRST}",
                    flags=f"{PROFILED} {ranks}" if role == FIRST else "",
                    proxy=True,
                )
            )
    return launches


def _left_out(gpus: int) -> tuple[str, ...]:
    """What needs eight GPUs, or four."""
    wanted = {
        8: ("TP2xPP2xEP2xDP2", "TP2+SP with EP4 and DP4", "EP8", "DP8 -> DP4 -> DP2", "PP4xVPP2 and TP4 with DP2"),
        4: ("TP2xPP2xEP2", "TP4", "EP4", "PP4 and PP4xVPP2, PP4 -> PP2", "DP4 -> DP2 -> DP1"),
    }
    return tuple(f"{name} ({size} GPUs)" for size, names in wanted.items() if size > gpus for name in names)


def flags_of(launch: Launch, steps: int, sizes: str = MODEL) -> list[str]:
    """The command line of ``pretrain_hybrid.py`` (of a proxy: what is added to its script's), without folders."""
    if launch.proxy:
        return f"{launch.layout.recipe.flags} {launch.flags} {TINY if sizes == TINY else ''}".split()
    stops = f"--exit-interval {launch.last}" if launch.last < steps else ""
    words = f"{sizes} {TRAINING} {launch.layout.recipe.flags} {launch.layout.flags} {launch.flags} {stops}"
    return [*words.split(), "--train-iters", str(steps)]
