"""The guard refuses every floating-point sum that is left to a backend, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce as imported_before
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

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
            assert "several ranks" in str(error)
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
        lambda: functional.all_reduce(x, "sum", dist.group.WORLD),
        lambda: functional.all_reduce_coalesced([x.long(), x], "avg", dist.group.WORLD),
        lambda: functional.reduce_scatter_tensor_coalesced([x], "product", [0], dist.group.WORLD),
        lambda: torch.ops._c10d_functional.all_reduce_(x.clone(), "sum", dist.group.WORLD.group_name),
        lambda: torch.ops._c10d_functional.reduce_scatter_tensor(x, "SUM", 2, dist.group.WORLD.group_name),
        lambda: _partial(x).full_tensor(),
    )
    others = _refused(
        lambda: ordered_sums().all_reduce(group, x),
        lambda: sum_integers(group, x.long()),
        lambda: maximum(group, x),
        lambda: dist.all_reduce(x.clone(), op=dist.ReduceOp.MIN),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather_object([None, None], "any"),
        lambda: dist.barrier(),
        lambda: functional.all_reduce(x, "max", dist.group.WORLD).wait(),
        lambda: functional.all_reduce(x.long(), "sum", dist.group.WORLD).wait(),
        lambda: functional.all_gather_tensor(x, 0, dist.group.WORLD).wait(),
    )
    remove()
    without = _refused(
        lambda: dist.all_reduce(x.clone()),
        lambda: functional.all_reduce(x, "sum", dist.group.WORLD).wait(),
        lambda: _partial(x).full_tensor(),
    )
    return sums, others, without


def _partial(x: torch.Tensor) -> DTensor:
    """What a sum over the two ranks would be; whoever wants to see it asks for the sum."""
    return DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Partial()])


def test_float_sums_are_refused_whoever_asks_and_everything_else_is_not() -> None:
    for sums, others, without in run_ranks(2, _under_guard):
        assert all(sums), sums
        assert not any(others), others
        assert not any(without), "the guard stays when it is taken away"
