"""run_ranks: run one function on n gloo ranks and get what each returned; ranks are forked after torch and the
package are imported.

A rank function is a plain module-level function. It returns what it saw and the parent asserts, so one assertion can
compare all ranks. The first rank that fails kills the others at once, and its traceback is the test's.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.ops.blocked_fold.reference import blocked_fold
from megatron.core.process_groups.groups import ProcessGroups, create_process_groups
from megatron.core.process_groups.ordered_reduce import OrderedSums
from megatron.core.process_groups.topology import plan_topology

_PRELOAD = ["tests.support.preload"]
COLLECTIVE_TIMEOUT_S = 60


def _rank_main(
    rank: int, world: int, meeting: tuple[str, str], fn: Callable[..., Any], args: tuple, results: Any
) -> None:
    backend, store = meeting
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    try:
        if world > 1:
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
        # Plain pickle copies tensors; the pipe's own would share memory that dies with this process.
        results.send_bytes(pickle.dumps((rank, fn(*args), None)))
        results.close()
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # the traceback must reach the parent whatever it is
        results.send_bytes(pickle.dumps((rank, None, traceback.format_exc())))
        results.close()
        os._exit(1)  # do not wait in a collective that the others will never enter


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120, backend: str = "gloo"
) -> list[Any]:
    """``fn(*args)`` on ``world`` ranks that meet over ``backend``; the results in rank order.

    Raises:
        AssertionError: a rank failed; the message holds its traceback.
        TimeoutError: some ranks did not finish in time; the message names them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world, (backend, f"{folder}/store"), fn, args, sender), daemon=True
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return _collect(world, pipes, processes, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=0 if process.exitcode is not None else 5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(world: int, pipes: list, processes: list, timeout_s: float) -> list[Any]:
    done: dict[int, Any] = {}
    pending = dict(enumerate(pipes))
    deadline = time.monotonic() + timeout_s
    while pending:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for process in processes:
                process.kill()
            raise TimeoutError(f"ranks {sorted(pending)} of {world} did not finish in {timeout_s} s")
        for rank in [r for r, pipe in pending.items() if pipe in ready]:
            pipe = pending.pop(rank)
            try:
                _, value, error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                error, value = f"rank {rank} died without a word (exit code {processes[rank].exitcode})", None
            if error is not None:
                for process in processes:
                    process.kill()
                raise AssertionError(f"[rank {rank} of {world}]\n{error}")
            done[rank] = value
    return [done[rank] for rank in range(world)]


def groups_for_test(*, tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> ProcessGroups:
    """Process groups over all running ranks (call inside a rank function), tensors on the CPU."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return create_process_groups(plan_topology(world=world, tp=tp, pp=pp, ep=ep, etp=etp), torch.device("cpu"))


def ordered_sums() -> OrderedSums:
    """The deterministic sums on the reference fold."""
    return OrderedSums(blocked_fold)
