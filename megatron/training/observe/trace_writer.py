"""The files of a trace: a manifest, and one stream of lines per traced rank that only grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.folder import write_all
from megatron.core.trace.format import FORMAT, encode_line
from megatron.training.config.manifest import MANIFEST_FILE, Json
from megatron.training.observe.run_manifest import write_json


def write_trace_manifest(folder: Path, manifest: dict[str, Json], trace: Json) -> None:
    """Write ``manifest.json``: trajectory and launch as in a fingerprint folder, and what is traced."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"trajectory": manifest["trajectory"], "launches": [manifest["launch"]]}
    write_json(folder / MANIFEST_FILE, {**whole, "trace": {"format": FORMAT, **trace}})


class TraceWriter:
    """Appends lines to the file of one rank; what was written stays readable whatever happens later."""

    def __init__(self) -> None:
        self._file, self._path = -1, Path()

    def open(self, path: Path, head: dict[str, Any]) -> None:
        """Create the file and write its first line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.write(encode_line({"trace": FORMAT, **head}))

    def write(self, lines: bytes) -> None:
        """Append whole lines.

        Raises:
            OSError: the disk is full; names the file.
        """
        write_all(self._file, lines, self._path)

    def close(self, events: int) -> None:
        """Write the last line, sync and close; safe to call twice and before ``open``."""
        if self._file >= 0:
            self.write(encode_line({"closed": events}))
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1
