"""The picture of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from megatron.training.observe.curves import CurvesPicture


@pytest.mark.parametrize("name", [b"r\xc3\xbcn", b"r\xffn", b"$\\nosuch$ cost"])
def test_a_run_folder_may_have_any_name(tmp_path: Path, name: bytes):
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    steps = [{"kind": "train", "iteration": i, "losses": {"lm loss": 1.0 / i}, "grad_norm": 1.0} for i in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    CurvesPicture(folder).close()
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
