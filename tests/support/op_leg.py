"""One process that replays ops: ``python -m tests.support.op_leg DEVICE [planted] [OP ...]``.

Every variant of the catalog that promises to repeat its bits there, the references aside, has every case in every type
five times, with NaN in memory that nobody wrote and, on a GPU, with work on other streams. Rows of the launch table
that were measured on another machine, or for other sizes, are put in force as well. Prints a JSON object: cases whose
bits differ between replays, one digest by case for comparison with other processes, and whether the other streams can
get in the way. ``planted``: two ops have a fault. Without OP it is all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import torch

from megatron.core.config.numerics import NumericsConfig
from megatron.core.digest.bits import first_difference, same_bits, sha256_of
from megatron.core.ops import launch as launches
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.launch_table import Config, Key
from megatron.core.ops.registry import Guarantee, Op, Variant
from megatron.training.setup.determinism import pin_arithmetic
from tests.ops.calls import call, seeded_cases
from tests.support.replay import SideStreams
from tools.bench.tune import launches_of

DTYPES = frozenset({torch.float32, torch.bfloat16})
REPLAYS = 5
CYCLES = 200_000_000
"""About a tenth of a second of a GPU that only counts."""
Disturb = Callable[[], None]


class ForAllShapes(dict[Key, Config]):
    """A launch table in which one row stands for its kernel on every machine and for every size."""

    def __init__(self, kernel: str, config: Config) -> None:
        super().__init__()
        self.kernel, self.config = kernel, config

    def get(self, key: Key, default: Config | None = None) -> Config | None:
        """The row's configuration for its kernel."""
        return self.config if key[0] == self.kernel else default


def in_every_process_another(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Results that depend on the process."""
    return lambda *args: fn(*args) * (1.0 + 2.0**-10 * (1 + os.getpid() % 1000))


def in_every_call_another(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Results that are others in every replay of a case, the first one's aside."""
    calls = itertools.count()
    return lambda *args: fn(*args) * (1.0 + 2.0**-5 * (next(calls) % REPLAYS))


PLANTS = {"rms_norm": in_every_process_another, "moe_permute": in_every_call_another}
"""Faults by op."""


def replayable(device: str) -> Iterator[tuple[Op, Variant]]:
    """Ops and their variants that promise to repeat their bits on a device; definitions where there is nothing else."""
    for op in ALL_OPS:
        for variant in op.variants:
            only = len(op.variants) == 1 or variant is not op.variants[-1]
            if variant.outside is None and variant.guarantee.get(device, Guarantee.NONE) and only:
                yield op, variant


def replayed(
    op: Op, fn: Callable[..., object], dtype: torch.dtype, device: torch.device, disturb: Disturb
) -> tuple[dict[str, str], list[str]]:
    """A digest by case, and the cases whose bits were not those of the first replay."""
    digests, changing = {}, []
    for case in seeded_cases(op.spec, dtype, device):
        first = call(fn, case).tensors()
        digests[case.name] = hashlib.sha256("".join(map(sha256_of, first)).encode()).hexdigest()[:16]
        for _ in range(REPLAYS - 1):
            disturb()
            for left, right in zip(first, call(fn, case).tensors(), strict=True):
                if not same_bits(left, right):
                    changing.append(f"{case.name}: {first_difference(left, right)}")
    return digests, changing


def rows_of(variant: Variant, table: Mapping[Key, Config]) -> Iterator[tuple[str, ForAllShapes | None]]:
    """How a variant is launched: as here, and as each row of the table has it for one of its kernels."""
    yield "", None
    known = launches_of(variant)
    for kernel, gpu, shape in table:
        if kernel in known:
            yield f" as {kernel} {shape} on {gpu}", ForAllShapes(kernel, table[kernel, gpu, shape])


def can_contend(device: torch.device) -> bool:
    """Whether work of this stream is done while another stream, which began before, is not; never on a CPU."""
    if device.type != "cuda":
        return False
    value = torch.ones(1, device=device)
    torch.cuda.synchronize(device)
    other = torch.cuda.Stream(device)
    with torch.cuda.stream(other):
        torch.cuda._sleep(CYCLES)
    value.add_(1.0)
    torch.cuda.current_stream(device).synchronize()
    busy = not other.query()
    torch.cuda.synchronize(device)
    return busy


def main(device_type: str, *words: str) -> None:
    """Replay everything and print what was found."""
    device, planted, only = torch.device(device_type), "planted" in words, set(words) - {"planted"}
    unknown = only - {op.spec.name for op, _ in replayable(device_type)}
    if unknown:
        sys.exit(f"no op {', '.join(sorted(unknown))} that repeats its bits on {device_type}")
    pin_arithmetic(NumericsConfig(deterministic_mode=True))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    disturb: Disturb = SideStreams(7, device) if device_type == "cuda" else lambda: None
    digests, changing = {}, []
    for op, variant in replayable(device_type):
        if only and op.spec.name not in only:
            continue
        fn = PLANTS[op.spec.name](variant.fn) if planted and op.spec.name in PLANTS else variant.fn
        for dtype in DTYPES & variant.dtypes:
            for row, table in rows_of(variant, launches.TABLE):
                subject = f"{op.spec.name}={variant.name} {dtype}{row}"
                with mock.patch.object(launches, "TABLE", launches.TABLE if table is None else table):
                    found, wrong = replayed(op, fn, dtype, device, disturb)
                digests |= {f"{subject} {case}": value for case, value in found.items()}
                changing += [f"{subject} {case}" for case in wrong]
    print(json.dumps({"digests": digests, "changing": changing, "can_contend": can_contend(device)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
