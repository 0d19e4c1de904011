"""Signs of life: none at first, then where they belong."""

from __future__ import annotations

import sys

import pytest

from megatron.core.dist_checkpointing import progress


def test_progress_is_silent_at_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = progress.progress_of_rank("saving", 10**9, shown=True)
    shown.add(3 * 10**8)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    shown.add(2 * 10**8)
    assert "saving: 0.5 GB (50%) of this rank's share" in capsys.readouterr().out
    progress.progress_of_rank("saving", 1, shown=False).add(1)
    assert capsys.readouterr().out == ""
    progress.SlowProgress("comparing", 4 * 10**9, out=sys.stderr).add(10**9)
    assert capsys.readouterr().err.startswith("comparing: 1.0 GB (25%), ")
