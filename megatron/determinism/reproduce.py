"""A folder that shows one difference alone: the operation's arguments from both runs, and a script that repeats it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from megatron.core.trace.format import Event, decode_event, dump_folder
from megatron.determinism.trace_read import TraceFolder, open_folder
from megatron.determinism.trace_verdict import Verdict

SCRIPT = "reproduce.py"

_HEAD = '''\
"""{title}

    {launch} {script} [repeats]

Arguments and results are those of the two runs; exit code 1 where any repeat differs from another or from run A.
"""
import sys
from pathlib import Path

import torch

from megatron.core.digest.bits import sha256_of
from megatron.core.trace.flatten import named_tensors
'''

_BODY = """
here, repeats = Path(__file__).parent, int(sys.argv[1]) if len(sys.argv) > 1 else 20
rank = {rank}
runs = {{r: torch.load(here / f"run_{{r}}_rank_{{rank}}.pt", weights_only=False) for r in "ab"}}
bits = lambda value: [sha256_of(t)[:16] for _, t in named_tensors(value)]
{call}
for run, dump in runs.items():
    print(f"rank {{rank}}, run {{run}}: inputs {{bits(dump['arguments'])}}, results {{bits(dump['results'])}}")
    again = [bits(call(torch.load(here / f"run_{{run}}_rank_{{rank}}.pt", weights_only=False))) for _ in range(repeats)]
    print(f"  {{repeats}} repeats: {{len(set(map(tuple, again)))}} different results, first {{again[0]}}")
    runs[run]["again"] = again
same_inputs = bits(runs["a"]["arguments"]) == bits(runs["b"]["arguments"])
print("inputs of the two runs are", "the same" if same_inputs else "different")
steady = all(again == runs["a"]["again"][0] for again in runs["a"]["again"])
sys.exit(not steady or bits(runs["a"]["results"]) != bits(runs["b"]["results"]))
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

_COLLECTIVE_HEAD = """import torch.distributed as dist

from megatron.core.ops.blocked_fold.reference import blocked_fold
from megatron.core.process_groups import collectives
from megatron.core.process_groups.groups import Group
from megatron.core.process_groups.ordered_reduce import OrderedSums

dist.init_process_group("gloo")
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
def call(dump):
    return dump["results"]
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
        number = ranks.index(rank) if len(ranks) > 1 else 0
        shutil.copyfile(path, folder / f"run_{run}_rank_{number}.pt")
    script = folder / SCRIPT
    script.write_text(script_text(event, len(ranks)), encoding="utf-8")
    return script


def script_text(event: Event, members: int) -> str:
    """The script for one event."""
    launch, rank, head, call = "python", "0", "", _SHOW
    if event.kind == "op":
        path = event.name if event.name.count(".") == 2 else f"{event.name}.default"
        call = _OP.format(path=path, in_place=bool(event.outs) and event.outs[0].label == "self")
    elif event.kind == "kernel" and not event.name.endswith(".backward"):
        head, call = _KERNEL_HEAD.format(op=event.name, variant=event.meta["variant"]), _KERNEL
    elif event.kind in ("collective", "sum") and event.name not in ("exchange", "reduce_scatter_part"):
        launch, rank = f"torchrun --nproc-per-node {members}", "dist.get_rank()"
        head = _COLLECTIVE_HEAD.format(axis=event.meta["axis"], size=members)
        call = (_COLLECTIVE if event.kind == "collective" else _SUM).format(name=event.name)
    title = f"Repeats {event.name} of {event.scope or 'no module'} ({event.phase})."
    return _HEAD.format(title=title, launch=launch, script=SCRIPT) + head + _BODY.format(rank=rank, call=call.strip())


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
