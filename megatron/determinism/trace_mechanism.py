"""Naming what may have made a difference: each row of the table of common sources, recognised by what a trace shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.core.trace.format import LEVELS, Event
from megatron.determinism.trace_scan import TRAVELS, Mismatch, RankScan

RANDOM = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm", "random_", "multinomial"}
    | {"normal", "normal_", "uniform_", "bernoulli", "bernoulli_", "exponential_", "native_dropout", "dropout"}
)
PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "convolution", "_scaled_mm", "dot", "mv", "addmv"}
    | {"_grouped_mm", "grouped_gemm", "attention", "linear_grad", "grouped_grad"}
)


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A likely cause and what to do about it."""

    name: str
    text: str
    action: str


DATA = Mechanism(
    "data", "the runs read different tokens", "compare the `data` digests of the fingerprints; check sampler and files"
)
MASTERS = Mechanism(
    "state_before",
    "masters or moments differ before the first traced step",
    "compare what the runs start from: seed, initialisation and flags, or the checkpoint that is loaded",
)
REBUILT = Mechanism(
    "rebuilt_weight",
    "working weights differ while masters and moments agree: they were not made from the masters by the one cast",
    "look at what writes working weights: after a load they must be the masters, rounded once",
)
DRIFT = Mechanism(
    "replica_drift",
    "copies of one parameter differ between ranks of one run",
    "look at the gradient reduction of this parameter: a rank updated its copy with another gradient",
)
UNWRITTEN = Mechanism(
    "uninitialised_read",
    "the operation reads memory that nothing was seen to write",
    "fill the buffer, or allocate it with zeros",
)
PERMUTED = Mechanism(
    "permuted_dispatch",
    "the same rows in another order",
    "make the order part of the dispatch: sort by expert, source rank and position; break ties of the router by id",
)
VARIANT = Mechanism(
    "other_variant",
    "the runs used different variants of this op",
    "name one of them with --op-variants; `variant` in the manifests' ops says which each run chose, and why",
)
CONFIGURATION = Mechanism(
    "autotuning",
    "the kernel ran with another configuration",
    "pin the configuration, or name another variant with --op-variants",
)
GENERATOR = Mechanism(
    "generator_state",
    "a random operation drew other numbers from equal inputs",
    "save and restore this generator, or draw from a key",
)
NOISE_KEY = Mechanism(
    "noise_key",
    "the operation was given another key",
    "look at where the key is made: seed, iteration, logical micro-batch, layer and site must be all of it",
)
PATH = Mechanism(
    "communication_path",
    "every member gave the same, and something else arrived",
    "add in a stated order (--deterministic-mode), or look at the transport: algorithm, topology, links",
)
UNORDERED = Mechanism(
    "unordered_sum",
    "a reduction gave another result from equal inputs: its order of addition is not fixed (atomics)",
    "use a variant that states its order",
)
LIBRARY = Mechanism(
    "library_kernel",
    "a library product gave other bits from equal inputs",
    "if only one device shows it, test that device, otherwise pin the library's algorithm",
)
KERNEL = Mechanism(
    "operation",
    "the operation gave other bits from equal inputs",
    "read the operation for shared memory, streams or state it does not reset",
)
RACE = Mechanism(
    "race",
    "its producer wrote the same in both runs, another value was read here, and nothing recorded wrote in between",
    "wait for the stream or transfer that writes this tensor before it is read",
)
UNSEEN = Mechanism(
    "outside_capture",
    "the difference came in through something that was not recorded",
    "look for what writes this tensor unrecorded: another stream, a library, the host",
)
ARGUMENT = Mechanism("host_argument", "the host passed another value", "look at how the host computes this argument")
TO_REPEAT = (LIBRARY, KERNEL)
"""What repeating the operation alone, as the script that ``bisect`` writes does, tells most of."""


def next_action(mechanism: Mechanism, level: str, start: int) -> str:
    """What to do about a mechanism that traces of a level show from iteration ``start`` on: to trace more, where there
    is more to trace and it would tell more, otherwise the mechanism's own."""
    if mechanism is MASTERS and start > 1:
        return "trace earlier iterations; if the run was resumed, run `megatron-determinism checkpoint diff`"
    if mechanism is UNSEEN:
        more = [f"at level {LEVELS[-1]}"] * (level != LEVELS[-1]) + ["from an earlier iteration"] * (start > 1)
        return f"trace {', or '.join(more)}" if more else mechanism.action
    if mechanism in TO_REPEAT:
        return (
            "let `megatron-determinism bisect` run the two commands: it writes a script that repeats this operation "
            f"alone; {mechanism.action}"
        )
    return mechanism.action


def operation(event: Event) -> str:
    """The bare name of an operation: ``aten.mm.default`` and ``mm`` are one."""
    parts = event.name.split(".")
    return parts[1] if event.kind == "op" and len(parts) > 2 else parts[0]


def _rows_moved(mismatch: Mismatch, side: str) -> bool:
    pairs = mismatch.pairs(side)
    return any(a.rows is not None and a.rows == b.rows and a.digest != b.digest for a, b in pairs)


def drifting(scans: Sequence[RankScan], iteration: int) -> dict[tuple, list[int]]:
    """Copies of one parameter that agree between the ranks of run A and not in run B, or the other way round: the ranks
    in the minority, by (state, parameter, shards, start)."""
    holders: dict[tuple, dict[int, tuple[str, str]]] = {}
    for scan in scans:
        for place, digests in scan.state.items():
            if place[0] == iteration:
                holders.setdefault(place[1:], {})[scan.rank] = digests
    found = {}
    for place, by_rank in holders.items():
        for run in (0, 1):
            values = [digests[run] for digests in by_rank.values()]
            other = {digests[1 - run] for digests in by_rank.values()}
            if len(set(values)) > 1 and len(other) == 1:
                common = next(iter(other)) if next(iter(other)) in values else max(values, key=values.count)
                found[place] = [rank for rank, digests in by_rank.items() if digests[run] != common]
    return found


def of_state(mismatch: Mismatch, scan: RankScan, scans: Sequence[RankScan]) -> Mechanism:
    """Why the state before a step differs."""
    iteration = mismatch.at["iteration"]
    if drifting(scans, iteration):
        return DRIFT
    mine = {place: digests for place, digests in scan.state.items() if place[0] == iteration}
    masters = any(a != b for place, (a, b) in mine.items() if place[1] != "weights")
    return MASTERS if masters else REBUILT


def of_origin(mismatch: Mismatch, configurations: Sequence[Mapping]) -> Mechanism:
    """Why an operation gave another result from equal inputs."""
    event, other = mismatch.left, mismatch.right
    name = operation(event)
    if event.meta.get("variant") != other.meta.get("variant"):
        return VARIANT
    here = {"iteration": mismatch.at["iteration"], "op": name}
    if event.meta.get("config") != other.meta.get("config") or any(
        {key: c[key] for key in here} == here for c in configurations
    ):
        return CONFIGURATION
    if _rows_moved(mismatch, "outs"):
        return PERMUTED
    if event.kind in TRAVELS:
        return PATH
    if name in RANDOM and (not mismatch.args or event.kind == "op"):
        return NOISE_KEY if mismatch.args else GENERATOR
    if mismatch.args:
        return NOISE_KEY if "key" in event.args else ARGUMENT
    if name in PRODUCTS:
        return LIBRARY
    read = max((seen for seen in event.ins), key=lambda seen: _numel(seen.shape), default=None)
    if event.meta.get("guarantee") == "NONE" or (
        event.kind in ("op", "kernel") and read and _numel(event.outs[0].shape) < _numel(read.shape)
    ):
        return UNORDERED
    return KERNEL


def of_inputs(mismatch: Mismatch, produced: bool) -> Mechanism:
    """Why an operation was given something else; ``produced``: an earlier event of both runs made what run A read."""
    if mismatch.left.kind == "input" and any("batch" in label for label in mismatch.outputs):
        return DATA
    if any(a.unwritten or b.unwritten for a, b in mismatch.pairs("ins")):
        return UNWRITTEN
    if _rows_moved(mismatch, "ins"):
        return PERMUTED
    return RACE if produced else UNSEEN


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for extent in shape:
        numel *= extent
    return numel
