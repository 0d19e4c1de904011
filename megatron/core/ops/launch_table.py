"""The committed table of launch configurations as text and as a mapping."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

TABLE_FILE = Path(__file__).with_name("launch_table.json")

Config = dict[str, int]
"""Block sizes as the kernel names them, ``num_warps`` and ``num_stages``."""
Key = tuple[str, str, tuple[int, ...]]
"""Kernel, name of the GPU, class of shapes."""


def table_of(text: str) -> dict[Key, Config]:
    """The rows of a table's text."""
    return {(row["kernel"], row["gpu"], tuple(row["shape_class"])): row["config"] for row in json.loads(text)}


def text_of(table: Mapping[Key, Config]) -> str:
    """A table as text: one row a line, in order."""
    rows = [
        json.dumps({"kernel": kernel, "gpu": gpu, "shape_class": shape, "config": table[kernel, gpu, shape]})
        for kernel, gpu, shape in sorted(table)
    ]
    return "[\n" + ",\n".join(rows) + "\n]\n"


def rows_declared_in(code: str, table: Mapping[Key, Config]) -> str:
    """The rows, as text, of the kernels whose ``Launch`` the code declares: they are part of what that code does."""
    rows = {key: config for key, config in table.items() if f'kernel="{key[0]}"' in code}
    return text_of(rows) if rows else ""
