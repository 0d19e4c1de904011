"""The guard refuses every floating-point sum that is left to a backend, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce as imported_before
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from megatron.core.process_groups.collectives import maximum, sum_integers
from megatron.core.process_groups.float_sum_guard import FloatSumRefusedError, refuse_float_sums
from megatron.core.process_groups.ordered_reduce import NativeSums
from tests.support.ranks import groups_for_test, ordered_sums, run_ranks


def _refused(*calls: Callable[[], object]) -> list[bool]:
    out = []
    for call in calls:
        try:
            call()
        except FloatSumRefusedError as error:
            assert "2 ranks" in str(error)
            out.append(True)
        else:
            out.append(False)
    return out


def _under_guard() -> tuple[list[bool], list[bool], list[bool]]:
    group, x = groups_for_test().dp, torch.ones(4)
    remove = refuse_float_sums()
    refuse_float_sums()()
    sums = _refused(
        lambda: dist.all_reduce(x.clone()),
        lambda: imported_before(x.clone()),
        lambda: dist.all_reduce(x.bfloat16(), op=dist.ReduceOp.AVG),
        lambda: dist.all_reduce(x.double(), op=dist.ReduceOp.PRODUCT, group=group.handle),
        lambda: dist.reduce(x.clone(), 0),
        lambda: dist.reduce_scatter(x[:2].clone(), [x[:2], x[2:]]),
        lambda: NativeSums().all_reduce(group, x),
        lambda: NativeSums().reduce_scatter(group, x),
    )
    others = _refused(
        lambda: ordered_sums().all_reduce(group, x),
        lambda: sum_integers(group, x.long()),
        lambda: maximum(group, x),
        lambda: dist.all_reduce(x.clone(), op=dist.ReduceOp.MIN),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather_object([None, None], "any"),
        lambda: dist.barrier(),
    )
    remove()
    return sums, others, _refused(lambda: dist.all_reduce(x.clone()))


class _Halves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def _outside_of_python() -> tuple[list[bool], list[bool], list[bool]]:
    """Callers that never touch a process group's Python methods."""
    x, world = torch.ones(4), dist.group.WORLD
    name = world.group_name
    wrapped = torch.nn.parallel.DistributedDataParallel(_Halves())
    ops = torch.ops._c10d_functional
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(x, mesh, [Partial()])
    sums = (
        lambda: functional.all_reduce(x, "sum", world).add(0),
        lambda: functional.all_reduce(x, "avg", world).add(0),
        lambda: functional.reduce_scatter_tensor(x, "sum", 0, world).add(0),
        lambda: functional.all_reduce_coalesced([x, x], "sum", world)[0].add(0),
        lambda: ops.wait_tensor(ops.all_reduce_(x.clone(), "sum", name)),
        lambda: partial.redistribute(mesh, [Replicate()]).to_local().add(0),
        lambda: wrapped(x).backward(),
    )
    free = (
        lambda: functional.all_reduce(x.long(), "sum", world).add(0),
        lambda: functional.all_reduce(x, "max", world).add(0),
        lambda: functional.all_gather_tensor(x, 0, world).add(0),
        lambda: dist.all_reduce(x.clone(), op=dist.ReduceOp.MAX),
        lambda: dist.all_reduce(x.long()),
    )
    without = _refused(*sums)
    refuse_float_sums()
    gc.collect()  # the guard stays though nobody holds what it returned
    refused, others = _refused(*sums), _refused(*free)
    with torch.inference_mode():
        refused += _refused(lambda: functional.all_reduce(torch.ones(3), "sum", world).add(0))
    return refused, others, without


def test_sums_of_functional_collectives_and_of_torchs_reducer_are_refused() -> None:
    for sums, others, without in run_ranks(2, _outside_of_python):
        assert all(sums), sums
        assert not any(others), others
        assert not any(without), "the control: without the guard these are sums like any other"


def test_float_sums_are_refused_whoever_asks_and_everything_else_is_not() -> None:
    for sums, others, without in run_ranks(2, _under_guard):
        assert all(sums), sums
        assert not any(others), others
        assert without == [False], "the guard stays when it is taken away"
