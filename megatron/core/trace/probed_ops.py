"""An OpTable whose callables tell what went in and came out, forward and backward; variants stay what they were."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from megatron.core.ops.registry import OpTable, Variant
from megatron.core.trace.flatten import named_tensors
from megatron.core.trace.recorder import Recorder

DISPATCH_OPS = ("router_topk", "moe_permute", "moe_unpermute")
"""Ops that are the token dispatcher; recorded from level ``module`` on."""

OWN_OPS = frozenset({"digest_pieces", "digest_rows", "digest_words"})
"""Ops that recording itself uses; they are no part of a run."""

_BY_ROW = frozenset({*DISPATCH_OPS, "grouped_gemm", "embedding", "cross_entropy_stats"})


def probe_ops(table: OpTable, recorder: Recorder, names: Iterable[str] | None = None) -> OpTable:
    """The table with a probe around every op in ``names`` (default: all but those of recording itself)."""
    wanted = set(table.chosen) - OWN_OPS if names is None else set(names)
    chosen = {
        op: dataclasses.replace(v, fn=_probed(op, v, table.device, recorder)) if op in wanted else v
        for op, v in table.chosen.items()
    }
    return dataclasses.replace(table, chosen=chosen)


def tuned(variant: Variant) -> dict[str, dict[str, Any]]:
    """The attributes, as they are at any time, of all objects in the variant's modules that may be kernels or plans, by
    name. Asked once: there are many, and what is chosen is left on one of them later."""
    modules = (vars(sys.modules[name]) for name in (variant.fn.__module__, *variant.sources))
    found = {name: value for module in modules for name, value in module.items() if hasattr(value, "__dict__")}
    plain = (type, ModuleType, FunctionType)
    return {name: vars(value) for name, value in found.items() if not isinstance(value, plain)}


def configuration(tuned: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Launch configurations and plans that were chosen, by name: what autotuners leave on a kernel (``best_config``)
    and the ``plan_name`` of a library's plan."""
    chosen = {name: held.get("plan_name") or held.get("best_config") for name, held in tuned.items()}
    return {name: str(choice) for name, choice in chosen.items() if choice is not None}


def _probed(op: str, variant: Variant, device: str, recorder: Recorder) -> Callable[..., Any]:
    original, rows, kernels = variant.fn, op in _BY_ROW, tuned(variant)
    facts = {"variant": variant.name, "guarantee": variant.guarantee[device].name}
    names = tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.active:
            return original(*args, **kwargs)
        meta: dict[str, Any] = dict(facts)
        scope = recorder.scopes.here()
        result = None

        def run() -> Any:
            nonlocal result
            result = original(*args, **kwargs)
            chosen = configuration(kernels)
            if chosen:
                meta["config"] = chosen
            # An op that returns nothing has changed its arguments.
            return args if result is None else result

        recorder.around("kernel", op, run, ins=_read(names, args, kwargs), meta=meta, rows=rows)
        if torch.is_grad_enabled():
            _watch_backward(op, scope, result, recorder, facts)
        return result

    return call


def _read(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those that only take results (they are called ``out...``): what is in them before says
    nothing, and may be memory that was never written."""
    named = [None if name.startswith("out") else value for name, value in zip(names, args, strict=False)]
    return {
        "args": (*named, *args[len(names) :]),
        "kwargs": {k: v for k, v in kwargs.items() if not k.startswith("out")},
    }


def _watch_backward(op: str, scope: str, result: Any, recorder: Recorder, facts: dict[str, str]) -> None:
    """Record what the autograd node of the op's result is given and gives."""
    nodes, rows = {t.grad_fn for _, t in named_tensors(result) if t.grad_fn is not None}, op in _BY_ROW
    for node in nodes:

        def hook(grad_inputs: tuple, grad_outputs: tuple, name: str = node.name()) -> None:
            if recorder.active:
                ins = recorder.reader.note(grad_outputs, "grad_output", rows=rows, reuse=True)
                outs = recorder.reader.note(grad_inputs, "grad_input", rows=rows, reuse=True)
                meta = {**facts, "node": name}
                recorder.event("kernel", f"{op}.backward", ins=ins, outs=outs, scope=scope, meta=meta)

        node.register_hook(hook)
