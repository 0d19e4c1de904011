"""The picture of a run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from megatron.training.observe.curves import CurvesPicture, different_curves, draw_curves


@pytest.mark.parametrize("name", [b"r\xc3\xbcn", b"r\xffn", b"$\\nosuch$ cost"])
def test_a_run_folder_may_have_any_name(tmp_path: Path, name: bytes):
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    steps = [{"kind": "train", "iteration": i, "losses": {"lm loss": 1.0 / i}, "grad_norm": 1.0} for i in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    CurvesPicture(folder).close()
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_launches_with_identical_curves_are_one(tmp_path: Path):
    def launch(name: str, *norms: float) -> Path:
        steps = [
            {"kind": "train", "iteration": i, "losses": {"lm loss": 1.0}, "grad_norm": n} for i, n in enumerate(norms)
        ]
        valid = {"kind": "valid", "iteration": 1, "losses": {"lm loss": 2.0}}
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in (*steps, valid)))
        return tmp_path / name

    same = [launch("a", 1.0, math.nan), launch("b", 1.0, math.nan)]
    other = launch("c", 1.0, 2.0)
    assert [name for name, _, _ in different_curves("TP2", same)] == ["TP2: 2 launches, identical"]
    assert [name for name, _, _ in different_curves("TP2", same[:1])] == ["TP2"]
    (mine, train, valid), (named, *_) = different_curves("TP2", [*same, other])
    assert (mine, named) == ("TP2, launches 1, 2 (identical)", "TP2, launch 3")
    assert (len(train), len(valid)) == (2, 1)
    draw_curves({"TP2": [*same, other], "PP2": same}, tmp_path / "curves.png", "launches")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
