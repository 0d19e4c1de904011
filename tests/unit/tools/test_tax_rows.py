"""The rows of the tax: their commands, how many pairs at once, what there is time for, the merged table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.cli.parser import parse_run_config
from megatron.training.config.validate import resolve_and_validate
from tests.architecture.sources import ROOT
from tools.bench.tax_rows import NAME, ROWS, WORDS, chosen, launch_of, markdown, pairs_at_once, run_rows, write


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_command_line_is_accepted(row, tiny: bool) -> None:
    launch = launch_of(row, 30, tiny=tiny)
    launch[launch.index("env") + 2] = "LAUNCHER=echo"
    done = subprocess.run(launch, cwd=ROOT, capture_output=True, text=True, check=True)
    config = resolve_and_validate(parse_run_config(done.stdout.split()[1:]), row.gpus)
    assert config.training.exit_interval == 30
    assert config.training.global_batch_size == (4 if row.name == "TP2+SP" else 4 * row.gpus)


def test_no_gpu_idles_while_pairs_run() -> None:
    one, two = ROWS[0], ROWS[-1]
    assert [pairs_at_once(gpus, one, 6) for gpus in (1, 2, 4, 8)] == [(1, 6), (2, 6), (4, 8), (8, 8)]
    assert [pairs_at_once(gpus, two, 6) for gpus in (2, 4, 8)] == [(1, 6), (2, 6), (4, 8)]


def test_rows_are_chosen_by_name() -> None:
    assert [row.name for row in chosen("")] == list(WORDS)
    assert [row.name for row in chosen("EP2; balanced")] == ["balanced", "EP2"]
    with pytest.raises(ValueError, match="no row half: balanced"):
        chosen("half")


def test_rows_without_gpus_or_time_are_said(tmp_path: Path) -> None:
    options = argparse.Namespace(gpus=["0"], limit_s=20.0, iterations=30, pairs=6, tiny=False, out=tmp_path)
    options.chosen = chosen("balanced;EP2")
    facts = run_rows(options, tmp_path)
    assert {name: row["message"] for name, row in facts["rows"].items()} == {
        "balanced": "20 s left",
        "EP2": "needs 2 GPUs",
    }
    assert json.loads((tmp_path / f"{NAME}.json").read_text())["rows"]["EP2"]["status"] == "not run"


def measured(**more: object) -> dict[str, object]:
    side = {"step_s": 0.5, "peak_memory_bytes": 68e9, "gpu_idle_share": 0.02, "exposed_communication_s": 0.0}
    pairs = [{"ratio": 1.004}, {"ratio": 1.006}]
    row = {"status": "measured", "message": "tax +0.50%", "tax": 0.005, "interval": [0.004, 0.006], "max_tax": 0.01}
    row |= {"pairs": pairs, "baseline": side, "deterministic": {**side, "step_s": 0.5025}, "world_size": 1}
    return {**row, "where": {"attention": 0.002, "idle": 0.0005}, **more}


def test_table_and_picture(tmp_path: Path) -> None:
    rows = {"balanced": measured(), "DP2": {"status": "not run", "message": "3 s left", "world_size": 2}}
    facts = {"rows": rows, "gpus": 2, "seconds": 9.0}
    page = markdown(facts)
    assert (
        "| 1 | forced balance | 2 | 0.5000 | 0.5025 | +0.50% | +0.40% to +0.60% | 68.0 / 68.0 | 2.0 / 2.0 % |" in page
    )
    assert "| 2 | DP2, 8 sequences | not run: 3 s left |" in page
    assert "| attention | +2.00 |" in page
    write(tmp_path, facts)
    assert (tmp_path / f"{NAME}.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rehearsal_measures_two_processes(tmp_path: Path) -> None:
    words = ["--rows", "DP2", "--pairs", "1", "--iterations", "4", "--limit-s", "1700", "--tiny"]
    command = [sys.executable, "-m", "tools.bench.tax_rows", "--out", str(tmp_path), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    row = json.loads((tmp_path / f"{NAME}.json").read_text())["rows"]["DP2"]
    assert row["status"] == "measured", done.stdout + done.stderr
    assert row["baseline"]["step_s"] > 0
    # One pair has no interval, so nothing is shown of the limit.
    assert (row["verdict"], done.returncode) == ("inconclusive", 1)
