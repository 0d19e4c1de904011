"""A folder that shows one difference alone: the operation's arguments from both runs, and a script that repeats it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.trace.format import Event, decode_event, dump_folder
from megatron.determinism.trace_read import TraceFolder, open_folder
from megatron.determinism.trace_verdict import Verdict

SCRIPT = "reproduce.py"

_HEAD = '''\
"""{does} {name} of {scope} ({phase}).

    {launch} {script}{options}

Arguments and results are those of the two runs; exit code 1 where any two of these results and repeats differ.
"""
import sys
from pathlib import Path

import torch

from megatron.core.digest.bits import sha256_of
from megatron.core.trace.flatten import named_tensors
from megatron.determinism.reproduce import conclusion
'''

_BODY = """
here, repeats = Path(__file__).parent, {repeats}
rank = {rank}
load = lambda run: torch.load(here / f"run_{{run}}_rank_{{rank}}.pt", weights_only=False)
bits = lambda value: tuple(sha256_of(t)[:16] for _, t in named_tensors(value))
{call}
inputs, results, again, said = {{}}, {{}}, {{}}, []
for run in "ab":
    dump = load(run)
    inputs[run], results[run] = bits(dump["arguments"]), bits(dump["results"])
    said.append(f"rank {{rank}}, run {{run.upper()}}: inputs {{inputs[run]}}, results {{results[run]}}")
    again[run] = [bits(call(load(run))) for _ in range(repeats)]
    if repeats:
        said.append(f"  {{repeats}} repeats: {{len(set(again[run]))}} different results, first {{again[run][0]}}")
same_inputs = inputs["a"] == inputs["b"]{same_host}
said.append(f"inputs of the two runs are {{'the same' if same_inputs else 'different'}}")
said.append(f"verdict: {{conclusion(rank, results, again, same_inputs)}}\\n")
print("\\n".join(said), end="", flush=True)
{last}sys.exit(len({{*results.values(), *again["a"], *again["b"]}}) > 1)
"""

_OP = """
def call(dump):
    given = dump["arguments"]
    named = lambda value: getattr(torch, value[6:]) if str(value)[:6] == "torch." and isinstance(value, str) else value
    result = torch.ops.{path}(*given["args"], **{{key: named(value) for key, value in given["kwargs"].items()}})
    return dump["arguments"]["args"][0] if {in_place} else result
"""

_KERNEL = """
def call(dump):
    given = dump["arguments"]
    with torch.no_grad():
        result = fn(*given["args"], **given["kwargs"])
    return given["args"] if result is None else result
"""

_KERNEL_HEAD = """from megatron.core.ops.catalog import ALL_OPS

fn = {{op.spec.name: op for op in ALL_OPS}}["{op}"].variant("{variant}").fn
"""

_COLLECTIVE_HEAD = """import atexit

import torch.distributed as dist

from megatron.core.ops.blocked_fold.reference import blocked_fold
from megatron.core.process_groups import collectives
from megatron.core.process_groups.groups import Group
from megatron.core.process_groups.ordered_reduce import OrderedSums

dist.init_process_group("gloo")
atexit.register(dist.destroy_process_group)
group = Group(axis="{axis}", ranks=tuple(range({size})), rank=dist.get_rank(), handle=dist.group.WORLD)
"""

_COLLECTIVE = """
def call(dump):
    given = dump["arguments"]
    return collectives.{name}(group, *given["args"], **given["kwargs"])
"""

_SUM = """
def call(dump):
    return OrderedSums(blocked_fold).{name}(group, dump["arguments"])
"""

_SHOW = """
call = None  # its arguments alone do not give its result
"""


def write_reproducer(folder: Path, verdict: Verdict, traces: tuple[Path, Path]) -> Path | None:
    """Write arguments and script for the verdict's first event; ``None`` where the event was not dumped."""
    event = verdict.first.mismatch.left
    ranks = list(event.meta["ranks"]) if event.kind in ("collective", "sum") else [verdict.first.rank]
    folders = open_folder(traces[0]), open_folder(traces[1])
    dumps = {
        (run, rank): _dump_of(trace, rank, verdict)
        for run, trace in zip("ab", folders, strict=True)
        for rank in ranks
        if rank in trace.ranks
    }
    if not dumps or any(path is None for path in dumps.values()):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for (run, rank), path in dumps.items():
        shutil.copyfile(path, folder / f"run_{run}_rank_{rank}.pt")
    script = folder / SCRIPT
    script.write_text(script_text(verdict, ranks), encoding="utf-8")
    return script


def script_text(verdict: Verdict, ranks: Sequence[int]) -> str:
    """The script for the verdict's first event, which the arguments of ``ranks`` are there for. An event that cannot be
    computed again from its arguments is shown as it was."""
    event = verdict.first.mismatch.left
    launch, rank, head, call, last = "python", str(verdict.first.rank), "", _SHOW, ""
    if event.kind == "op":
        path = event.name if event.name.count(".") == 2 else f"{event.name}.default"
        call = _OP.format(path=path, in_place=bool(event.outs) and event.outs[0].label == "self")
    elif event.kind == "kernel" and not event.name.endswith(".backward"):
        head, call = _KERNEL_HEAD.format(op=event.name, variant=event.meta["variant"]), _KERNEL
    elif event.kind in ("collective", "sum") and event.name not in ("exchange", "reduce_scatter_part"):
        launch, rank = f"torchrun --nproc-per-node {len(ranks)}", f"{list(ranks)}[dist.get_rank()]"
        head = _COLLECTIVE_HEAD.format(axis=event.meta["axis"], size=len(ranks))
        call = (_COLLECTIVE if event.kind == "collective" else _SUM).format(name=event.name)
        last = "dist.barrier()  # torchrun ends the others once a rank fails\n"
    again = call is not _SHOW
    return (
        _HEAD.format(
            does="Repeats" if again else "Shows",
            name=event.name,
            scope=event.scope or "no module",
            phase=event.phase,
            launch=launch,
            script=SCRIPT,
            options=" [repeats]" * again,
        )
        + head
        + _BODY.format(
            rank=rank,
            call=call.strip(),
            last=last,
            repeats="int(sys.argv[1]) if len(sys.argv) > 1 else 20" if again else "0",
            same_host=" and False  # the trace says that the host passed other values" * verdict.first.mismatch.args,
        )
    )


def conclusion(
    rank: int,
    results: Mapping[str, tuple[str, ...]],
    again: Mapping[str, Sequence[tuple[str, ...]]],
    same_inputs: bool,
) -> str:
    """The sentence a script ends with, from the digests of what each run got (``results`` of ``a`` and ``b``) and of
    what its arguments gave when repeated (``again``, as often for both; never where the event cannot be repeated)."""
    repeats = len(again["a"])
    if not repeats:
        inputs, differing = ("the same" if same_inputs else "different"), results["a"] != results["b"]
        outcome = "different" if differing else "the same"
        return f"nothing was repeated; on rank {rank} the inputs of the two runs are {inputs}, the results {outcome}"
    if any(len(set(seen)) > 1 for seen in again.values()) or (same_inputs and again["a"][0] != again["b"][0]):
        return f"on rank {rank} the same arguments give different results when repeated: the operation does not repeat"
    given = f"what {repeats} repeat{'s' * (repeats != 1)} of"
    gives = "give" if repeats != 1 else "gives"
    others = [run.upper() for run in "ab" if results[run] != again[run][0]]
    if len(others) == 2:
        return f"neither run's result on rank {rank} is {given} its arguments {gives}: here, alone, they give another"
    if others:
        right = "A" if others == ["B"] else "B"
        return f"run {others[0]}'s result on rank {rank} is not {given} its arguments {gives}; run {right}'s is"
    found = "nothing differs here" if same_inputs else "the inputs differ, so look for what made them"
    return f"both runs' results on rank {rank} are {given} their arguments {gives}: {found}"


def _dump_of(trace: TraceFolder, rank: int, verdict: Verdict) -> Path | None:
    """The dump of the verdict's event on one rank."""
    for event in events_like(trace, rank, verdict):
        if event.meta.get("dump"):
            path = trace.path / dump_folder(rank) / event.meta["dump"]
            return path if path.is_file() else None
    return None


def events_like(trace: TraceFolder, rank: int, verdict: Verdict, kind: str | None = None) -> list[Event]:
    """The verdict's event on another rank or in another run: same place and number in the same part of the step; for
    ``kind`` all events of that kind and the same scope instead. A logical shard is worked on by one rank, so shards are
    left out."""
    wanted, found = verdict.first.mismatch, []
    scope = wanted.left.scope.partition(":")[0]
    at = {key: value for key, value in wanted.at.items() if key != "shard"}
    for segment in trace.stream(rank).segments():
        if {key: value for key, value in segment.at.items() if key != "shard"} != at:
            continue
        for raw in segment.events:
            if scope.encode() not in raw:
                continue
            event = decode_event(raw)
            alike = _place(event) == _place(wanted.left)
            if alike if kind is None else (event.kind == kind and event.scope == scope):
                found.append(event)
    return found


def _place(event: Event) -> tuple:
    return event.kind, event.scope, event.name, event.phase, event.occurrence


def choices(verdict: Verdict, traces: tuple[Path, Path]) -> list[dict[str, Any]]:
    """Which variant and configuration every rank of both runs used for the verdict's operation, or for the kernel it
    ran inside."""
    chosen = []
    for run, path in zip("AB", traces, strict=True):
        trace = open_folder(path)
        for rank in trace.ranks:
            for event in events_like(trace, rank, verdict, "kernel"):
                facts = {"run": run, "rank": rank, "op": event.name, "variant": event.meta["variant"]}
                facts["config"] = event.meta.get("config")
                if facts not in chosen:
                    chosen.append(facts)
    return chosen


def choice_lines(chosen: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each different one of ``choices``, with the runs and ranks that made it."""
    makers: dict[str, dict[str, list[int]]] = {}
    for choice in chosen:
        what = f"{choice['op']} = {choice['variant']} {choice['config'] or ''}".rstrip()
        makers.setdefault(what, {}).setdefault(choice["run"], []).append(choice["rank"])
    lines = []
    for what, runs in makers.items():
        ranks = {run: f"rank{'s' * (len(found) != 1)} {', '.join(map(str, found))}" for run, found in runs.items()}
        both = len(runs) == 2 and runs["A"] == runs["B"]
        who = [f"both runs, {ranks['A']}"] if both else [f"run {run}, {named}" for run, named in ranks.items()]
        lines.append(f"  {'; '.join(who)}: {what}")
    return lines
