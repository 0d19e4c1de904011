"""Dataclass fields as the single source of a setting: flag, help text, documentation and JSON all come from the field.

A field is declared with one of three constructors that state what changing it does to a run:

* ``trajectory``: changes the numbers the run computes; two runs that differ here are not comparable;
* ``layout``: changes where work is done, never the numbers (deterministic mode promises this);
* ``operational``: changes what is written, shown or waited for.

Megatron's conventions hold for the flags: underscores become dashes, a switch that is off by default is a bare
flag, a switch that is on by default gets ``--no-x`` and ``--disable-x``, abbreviations are not accepted.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from typing import Any, Literal

Effect = Literal["trajectory", "layout", "operational"]


def _option(effect: Effect, default: Any, flags: tuple[str, ...], negates: bool, derived: bool) -> Any:
    metadata = {"effect": effect, "flags": flags, "negates": negates, "derived": derived}
    return dataclasses.field(default=default, metadata=metadata)


def trajectory(default: Any, *, flags: tuple[str, ...] = (), negates: bool = False, derived: bool = False) -> Any:
    """Declare a field that changes the numbers of a run.

    ``flags`` replaces the spelling made from the field's name; with ``negates`` those spellings store ``False``.
    A ``derived`` field has no flag: it is filled by ``resolve``.
    """
    return _option("trajectory", default, flags, negates, derived)


def layout(default: Any, *, flags: tuple[str, ...] = (), negates: bool = False, derived: bool = False) -> Any:
    """Declare a field that says where work is done and leaves the numbers alone. Arguments as ``trajectory``."""
    return _option("layout", default, flags, negates, derived)


def operational(default: Any, *, flags: tuple[str, ...] = (), negates: bool = False, derived: bool = False) -> Any:
    """Declare a field that affects output, timing or hosts only. Arguments as ``trajectory``."""
    return _option("operational", default, flags, negates, derived)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One command line option, derived from one dataclass field; ``text`` is about the field, ``help`` about the
    flag."""

    owner: type
    name: str
    spellings: tuple[str, ...]
    hint: Any
    default: Any
    effect: Effect
    text: str
    negates: bool

    @property
    def help(self) -> str:
        """What the flag does as it is typed: for one that switches off, the text of its setting says what."""
        return f"Switches off: {self.text[:1].lower()}{self.text[1:]}" if self.negates else self.text

    @property
    def inner(self) -> Any:
        """The type of one value: ``Optional[T]`` and ``tuple[T, ...]`` are unwrapped to ``T``."""
        return _unwrap(self.hint)[0]

    @property
    def repeated(self) -> bool:
        """True where the option takes one or more values."""
        return _unwrap(self.hint)[1]

    @property
    def is_switch(self) -> bool:
        """True where the option takes no value."""
        return self.inner is bool and not self.repeated


def _unwrap(hint: Any) -> tuple[Any, bool]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [a for a in args if a is not type(None)]
        return _unwrap(inner)
    if origin is tuple:
        return args[0], True
    return hint, False


@functools.cache
def field_texts(cls: type) -> dict[str, str]:
    """The string under each field of ``cls`` and its bases: what the setting does, for a switch when it is on. It is
    the field's documentation and makes the ``--help``."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for node, after in zip(body, body[1:], strict=False):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                texts[node.target.id] = " ".join(str(after.value.value).split())
    return texts


def _spellings(field: dataclasses.Field, is_switch: bool) -> tuple[tuple[str, ...], bool]:
    if field.metadata["flags"]:
        return field.metadata["flags"], field.metadata["negates"]
    dashed = field.name.replace("_", "-")
    if is_switch and field.default is True:
        return (f"--no-{dashed}", f"--disable-{dashed}"), True
    return (f"--{dashed}",), False


@functools.cache
def flags_of(cls: type) -> tuple[Flag, ...]:
    """Every flag of a configuration dataclass, in field order.

    Raises:
        TypeError: a field has no text under it, or was not declared with ``trajectory``, ``layout`` or
            ``operational``.
    """
    texts, hints, flags = field_texts(cls), typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        if "effect" not in field.metadata:
            raise TypeError(f"{cls.__name__}.{field.name} does not declare its effect on a run")
        if field.name not in texts:
            raise TypeError(f"{cls.__name__}.{field.name} has no text under it; that text is its --help")
        if field.metadata["derived"]:
            continue
        inner, repeated = _unwrap(hints[field.name])
        spellings, negates = _spellings(field, inner is bool and not repeated)
        flags.append(
            Flag(
                owner=cls,
                name=field.name,
                spellings=spellings,
                hint=hints[field.name],
                default=field.default,
                effect=field.metadata["effect"],
                text=texts[field.name],
                negates=negates,
            )
        )
    return tuple(flags)


def fields_with_effect(config: Any, effect: Effect) -> dict[str, Any]:
    """Values of the fields of one dataclass instance that have the given effect, by field name."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.metadata["effect"] == effect}


def spelling_of(cls: type, name: str) -> str:
    """The first spelling of the flag of a field, for error messages."""
    return next(flag.spellings[0] for flag in flags_of(cls) if flag.name == name)
