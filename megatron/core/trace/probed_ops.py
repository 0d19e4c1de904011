"""An OpTable whose callables tell what went in and came out, forward and backward; variants stay what they were."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
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


def configuration(variant: Variant) -> dict[str, str]:
    """Launch configurations and plans that the variant's modules say they have chosen, by name.

    Read from what autotuners leave on a kernel (``best_config``) and from ``plan_name`` of a library's plan.
    """
    found = {}
    for module in (variant.fn.__module__, *variant.sources):
        for name, value in vars(sys.modules[module]).items():
            for attribute in ("best_config", "plan_name"):
                chosen = vars(value).get(attribute) if hasattr(value, "__dict__") else None
                if chosen is not None:
                    found[name] = str(chosen)
    return found


def _probed(op: str, variant: Variant, device: str, recorder: Recorder) -> Callable[..., Any]:
    original = variant.fn
    facts = {"variant": variant.name, "guarantee": variant.guarantee[device].name}
    names = tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.active:
            return original(*args, **kwargs)
        meta: dict[str, Any] = dict(facts)
        given = _read(names, args, kwargs)
        scope = recorder.scope()
        results: list[Any] = []

        def run() -> Any:
            results.append(original(*args, **kwargs))
            chosen = configuration(variant)
            if chosen:
                meta["config"] = chosen
            return results[0] if results[0] is not None else args

        # An op that returns nothing has changed its arguments.
        recorder.around("kernel", op, run, ins=given, meta=meta, rows=op in _BY_ROW)
        if torch.is_grad_enabled():
            _watch_backward(op, scope, results[0], recorder, facts)
        return results[0]

    return call


def _read(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those that only take results (they are called ``out...``): what is in them before says
    nothing, and may be memory that nobody wrote."""
    named = [None if name.startswith("out") else value for name, value in zip(names, args, strict=False)]
    return {
        "args": (*named, *args[len(names) :]),
        "kwargs": {k: v for k, v in kwargs.items() if not k.startswith("out")},
    }


def _watch_backward(op: str, scope: str, result: Any, recorder: Recorder, facts: dict[str, str]) -> None:
    """Record what the autograd node of the op's result is given and gives."""
    nodes = {t.grad_fn for _, t in named_tensors(result) if t.grad_fn is not None}
    for node in nodes:

        def hook(grad_inputs: tuple, grad_outputs: tuple, name: str = node.name()) -> None:
            if recorder.active:
                ins = recorder.note(grad_outputs, "grad_output", rows=op in _BY_ROW, reuse=True)
                outs = recorder.note(grad_inputs, "grad_input", rows=op in _BY_ROW, reuse=True)
                meta = {**facts, "node": name}
                recorder.event("kernel", f"{op}.backward", ins=ins, outs=outs, scope=scope, meta=meta)

        node.register_hook(hook)
