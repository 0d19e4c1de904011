"""OpMode: every ATen operation a step runs, forward and backward, as an event.

What cannot have a value of its own is left out, so that it cannot be a false alarm: views, memory fresh from ``empty``,
results of collectives that are not waited for (the collective's own event has them), and host copies that a device is
still writing. Operations that write in place are digested before and after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.trace.flatten import named_tensors, plain_arguments
from megatron.core.trace.recorder import Recorder

_WITHOUT_VALUE = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_", "set_"}
)
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "random_", "bernoulli_"})
_INDEXING = frozenset(
    {"index_select", "index_copy", "index_copy_", "scatter", "scatter_", "gather", "index_put_", "index", "index_add_"}
)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What an operation's schema says; asking for it costs more than recording the operation."""

    name: str
    text: str
    is_view: bool
    communicates: bool
    arguments: tuple[str, ...]
    writes: frozenset[str]

    def written(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the operation changes in place, by name."""
        if not self.writes:
            return {}
        given = dict(zip(self.arguments, args, strict=False)) | dict(kwargs)
        return {name: value for name, value in given.items() if name in self.writes and value is not None}


@cache
def _facts(func: Any) -> _Facts:
    schema = func._schema
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    return _Facts(
        name=schema.name.partition("::")[2],
        text=str(func),
        is_view=bool(aliases) and not any(alias.is_write for alias in aliases),
        communicates=func.namespace in _COMMUNICATION,
        arguments=tuple(a.name for a in schema.arguments),
        writes=frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
    )


class OpMode(TorchDispatchMode):
    """Active around a traced step."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it."""
        kwargs, facts, recorder = kwargs or {}, _facts(func), self._recorder
        if recorder.reader.busy or not recorder.active or facts.is_view:
            return func(*args, **kwargs)
        if facts.communicates:
            result = func(*args, **kwargs)
            recorder.reader.unwritten.made(args)
            return result
        if facts.name in _WITHOUT_VALUE:
            result = func(*args, **kwargs)
            recorder.reader.unwritten.allocated(result)
            return result
        return self._record(func, facts, args, kwargs)

    def _record(self, func: Any, facts: _Facts, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        recorder, changed = self._recorder, facts.written(args, kwargs)
        # What is in an argument before says nothing where it is overwritten whole, or has no value yet.
        only_written = (
            facts.name in _OVERWRITING
            or not changed.keys().isdisjoint(kwargs)
            or any(recorder.reader.unwritten.holds(tensor) for _, tensor in named_tensors(changed))
        )
        read: Any = (args, kwargs)
        if only_written:
            read = (
                [a for a, name in zip(args, facts.arguments, strict=False) if name not in changed],
                {key: value for key, value in kwargs.items() if key not in changed},
            )
        rows = facts.name in _INDEXING
        scope = recorder.scopes.here()
        ins = recorder.reader.note(read, rows=rows, flag=True)
        saved = recorder.save("op", scope, facts.text, {"args": args, "kwargs": dict(kwargs)})
        result = func(*args, **kwargs)
        if changed:
            recorder.reader.unwritten.written(changed)
            outs = recorder.reader.note(changed, rows=rows)
        else:
            recorder.reader.unwritten.made(result)
            outs = recorder.reader.note(_waited_for(result, args, kwargs), "result", rows=rows)
        meta = {} if saved is None else {"dump": saved.finish(changed or result)}
        if outs:
            text = plain_arguments((args, dict(kwargs)))
            recorder.event("op", facts.text, ins=ins, outs=outs, scope=scope, args=text, meta=meta)
        return result


def _waited_for(result: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The result, without host tensors that a device may still be writing."""
    if kwargs.get("non_blocking") and any(t.device.type != "cpu" for _, t in named_tensors(args)):
        return [t for _, t in named_tensors(result) if t.device.type != "cpu"]
    return result
