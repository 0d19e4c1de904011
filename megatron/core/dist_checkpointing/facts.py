"""``metadata.json``: what a checkpoint says of itself, with a digest over its own bytes. Torch is not needed here.

It is the last file written into a checkpoint folder, so a folder without it is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from megatron.core.config.errors import DamagedInputError
from megatron.core.dist_checkpointing.regular_file import open_regular, read_regular

FACTS_FILE = "metadata.json"
FORMAT = "megatron-bitwise"
FORMAT_VERSION = 2

_DIGEST = "digest"
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "iteration": int,
    "consumed_train_samples": int,
    "consumed_valid_samples": int,
    "schedule": dict,
    "schedule_position": int,
    "logical_layout": dict,
    "physical_layout": dict,
    "trajectory": dict,
    "branches": list,
    "has_optimizer": bool,
    "has_generators": bool,
    "tensors": dict,
    "files": dict,
}

_MEGATRON_FIELDS = {"sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version"}

Facts = dict[str, Any]


class DamagedFactsError(DamagedInputError):
    """``metadata.json`` is there, but not with the bytes that were written."""


def encode_facts(facts: Facts) -> bytes:
    """The bytes of the file: the facts, then the digest of everything before it."""
    head = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
    }
    body = {**head, **facts}
    body.pop(_DIGEST, None)
    return _bytes({**body, _DIGEST: hashlib.sha256(_bytes(body)).hexdigest()})


def _bytes(value: Facts) -> bytes:
    return json.dumps(value, indent=1).encode("utf-8") + b"\n"


def read_facts(folder: Path) -> Facts:
    """The facts of one checkpoint folder.

    Raises:
        DamagedInputError: the file is missing, is not one of ours, or a byte of it has changed; names the file.
    """
    path = folder / FACTS_FILE
    try:
        raw = read_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedInputError(f"{path}: no such file; {folder} is not a complete checkpoint") from error
    except OSError as error:
        raise DamagedInputError(f"{path} cannot be read: {error}") from error
    try:
        facts = json.loads(raw)
    except ValueError as error:
        raise DamagedFactsError(f"{path} is damaged ({error})") from error
    if not isinstance(facts, dict):
        raise DamagedFactsError(f"{path} is not the {FACTS_FILE} of a checkpoint")
    if "sharded_backend" in facts and facts.keys() <= _MEGATRON_FIELDS:
        raise DamagedInputError(
            f"{path}: this checkpoint was made by Megatron-LM or Megatron-Core; its keys are not ours, it cannot be "
            "loaded here"
        )
    if encode_facts(facts) != raw:
        raise DamagedFactsError(f"{path} is damaged: its contents do not match its own digest")
    if facts["format"] != FORMAT or facts.get("format_version") != FORMAT_VERSION:
        found = f"{facts['format']} {facts.get('format_version')}"
        raise DamagedInputError(f"{path}: the format is {found}, this version reads {FORMAT} {FORMAT_VERSION}")
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(facts.get(name), kind)]
    if wrong:
        raise DamagedInputError(f"{path}: {', '.join(wrong)} missing or of the wrong type")
    return facts


def file_problem(folder: Path, name: str, stated: dict[str, Any]) -> str | None:
    """What is wrong with one file of a checkpoint; ``None`` where size and SHA-256 are as stated."""
    path = folder / name
    try:
        with open_regular(path) as file:
            size, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{path}: no such file"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return unlike_stated(path, size, digest, stated)


def unlike_stated(path: Path, size: int, sha256: str, stated: dict[str, Any]) -> str | None:
    """What is wrong with a file of this size and SHA-256; ``None`` where they are as stated."""
    if size != stated["bytes"]:
        return f"{path}: {size} bytes, {stated['bytes']} were written"
    if sha256 != stated["sha256"]:
        return f"{path}: its SHA-256 is not that of the file that was written"
    return None
