"""tax: paired legs in fresh processes, the report, and how each ending is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron.determinism import __main__ as command
from megatron.determinism.report import Exit, Outcome
from megatron.determinism.tax import Request, tax
from megatron.determinism.tax_legs import UNWRITTEN, split_gpus, without
from tests.architecture.sources import ROOT
from tests.support.training import TINY


def launch(kind: str, *further: str) -> list[str]:
    return [sys.executable, str(ROOT / "tests/support/tax_leg.py"), kind, *further]


def measure(kind: str, folder: Path, *further: str, **request: object) -> Outcome:
    return tax(launch(kind, *further), folder, Request(**request))


def argv_of(leg: Path) -> list[str]:
    return json.loads((leg / "run" / "manifest.json").read_text())["launch"]["argv"]


def test_report_of_steady_legs(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    outcome = measure("steady", tmp_path, "--deterministic-mode", pairs=3, max_tax=0.02)
    assert outcome.exit == Exit.SAME, outcome
    assert outcome.verdict.startswith("tax +1.00% (95% interval +1.00% to +1.00%), 3 pairs; within --max-tax 2.00%")
    assert outcome.facts["verdict"] == "within"
    assert outcome.facts["tax"] == pytest.approx(0.01)
    assert outcome.facts["baseline"]["step_s"] == pytest.approx(0.2)
    assert outcome.facts["baseline"]["gpu_idle_share"] is None
    assert outcome.facts["where"] is None
    assert outcome.facts["iterations"] == [4, 5, 6, 7, 8, 9]
    ran = [line.split(" ...")[0] for line in capfd.readouterr().err.splitlines()]
    sides = ("baseline", "deterministic")
    assert ran == [
        *(f"{side}_1" for side in sides),
        *(f"{side}_2" for side in reversed(sides)),
        *(f"{side}_3" for side in sides),
        *(f"profile_{side}" for side in sides),
    ]
    assert json.loads((tmp_path / "report.json").read_text())["tax"] == outcome.facts["tax"]
    assert (tmp_path / "tax.png").read_bytes()[:4] == b"\x89PNG"
    assert "+1.00%" in (tmp_path / "report.html").read_text()


def test_legs_differ_in_the_mode_alone_and_keep_their_output_apart(tmp_path: Path):
    unwritten = ("--save=x", "--async-save", "--tensorboard-dir", "t")
    measure("steady", tmp_path, *unwritten, "--save-interval", "5", "--fingerprint-dir", "f", pairs=1)
    own = {}
    for name in ("baseline_1", "deterministic_1", "profile_baseline"):
        leg = tmp_path / name
        words = argv_of(leg)
        for flag, folder in (("--run-dir", "run"), ("--fingerprint-dir", "fingerprint")):
            assert words[words.index(str(leg / folder)) - 1] == flag
        assert words[:4] == ["--save-interval", "5", "--fingerprint-dir", "f"]
        own[name] = words[4 : words.index("--run-dir")]
    assert own["baseline_1"] == ["--no-deterministic-mode", "--op-variants", "fastest"]
    assert own["deterministic_1"] == ["--deterministic-mode"]
    window = ["--profile", "--use-pytorch-profiler", "--profile-step-start", "4", "--profile-step-end", "7"]
    assert own["profile_baseline"] == [*own["baseline_1"], *window, "--profile-ranks", "0", "--exit-interval", "6"]


def test_slow_deterministic_leg_is_over_the_limit(tmp_path: Path):
    outcome = measure("slow", tmp_path, pairs=6, max_tax=0.01)
    assert (outcome.exit, outcome.facts["verdict"]) == (Exit.DIFFERENT, "over")
    assert outcome.facts["interval"] == pytest.approx((0.5, 0.5))


def test_interval_wider_than_the_limit_is_inconclusive(tmp_path: Path):
    outcome = measure("noisy", tmp_path, pairs=6, max_tax=0.05)
    assert (outcome.exit, outcome.facts["verdict"]) == (Exit.DIFFERENT, "inconclusive")
    assert "inconclusive: the interval is wider than --max-tax 5.00%" in outcome.verdict


def test_figures_of_the_gpu_and_one_knob_at_a_time(tmp_path: Path):
    outcome = measure("gpu", tmp_path, pairs=2, ablate=True)
    base, ours = outcome.facts["baseline"], outcome.facts["deterministic"]
    assert base["gpu_utilisation"] == pytest.approx(0.75)
    assert ours["gpu_idle_share"] == pytest.approx(0.25)
    assert ours["peak_memory_bytes"] == 6 * 10**9 + 1
    assert base["exposed_communication_s"] == pytest.approx(0.005)
    assert outcome.facts["where"] == pytest.approx({"attention": 0.015, "gemm": 0.0, "idle": 0.005})
    rows = {row["knob"]: row for row in outcome.facts["ablation"]}
    assert rows["attention"]["tax"] == pytest.approx(1 / 0.95 - 1)
    assert rows["attention"]["flags"] == ["--deterministic-mode", "--op-variants", "attention=fast_cudnn"]
    assert rows["collectives"]["flags"][-1] == "float_sums=native"
    assert rows["torch's switches"]["tax"] == pytest.approx(0.1)
    for name in ("SSD", "conv", "MoE", "cross entropy", "memory fill", "autotune"):
        assert rows[name]["tax"] is None
    assert rows["memory fill"]["note"] == "off in both"
    assert not (tmp_path / "SSD_1").exists()


def test_knob_that_cannot_run_is_reported_and_fails_the_command(tmp_path: Path):
    outcome = measure("gpu", tmp_path, pairs=2, ablate=True)
    assert (outcome.exit, outcome.facts["verdict"]) == (Exit.DAMAGED, "failed")
    (row,) = [row for row in outcome.facts["ablation"] if row["knob"] == "other ops"]
    assert row["tax"] is None and "exit code 1" in row["note"]
    assert outcome.facts["tax"] == pytest.approx(0.1)
    assert not (tmp_path / "other_ops_2").exists()


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("fails", Exit.DAMAGED, "a leg failed with exit code 1"),
        ("short", Exit.DAMAGED, "1 iterations, and 1 of them are warm-up"),
        ("unprofiled", Exit.DAMAGED, "has no profile_rank_*.json"),
        ("deaf", Exit.NOT_COMPARABLE, "did not take --no-deterministic-mode --op-variants fastest"),
    ],
)
def test_endings(kind: str, code: Exit, words: str, tmp_path: Path):
    outcome = measure(kind, tmp_path, pairs=2)
    assert outcome.exit == code
    assert words in outcome.verdict


def test_command_that_fails_without_a_word(tmp_path: Path):
    outcome = tax([sys.executable, "-c", "raise SystemExit(5)"], tmp_path, Request(pairs=1))
    assert outcome.verdict.startswith("a leg failed with exit code 5")
    assert outcome.details == (f"  it printed nothing (whole output in {tmp_path / 'baseline_1' / 'output.log'})",)


def test_command_that_leaves_nothing(tmp_path: Path):
    outcome = tax([sys.executable, "-c", "pass"], tmp_path, Request(pairs=1))
    assert outcome.exit == Exit.DAMAGED
    assert "trained nothing" in outcome.verdict and "manifest.json" in outcome.details[0]


def test_deterministic_legs_that_differ_are_said(tmp_path: Path):
    outcome = measure("drifts", tmp_path, pairs=2)
    assert not outcome.facts["deterministic_legs_agree"]
    assert any("WARNING" in line for line in outcome.details)
    assert "DIFFER" in (tmp_path / "report.html").read_text()


def test_folder_in_use_and_variants_of_the_users_are_refused(tmp_path: Path):
    assert measure("steady", tmp_path / "a", "--op-variants=x=y").exit == Exit.NOT_COMPARABLE
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").touch()
    assert measure("steady", tmp_path / "b").exit == Exit.NOT_COMPARABLE


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["tax", "--json", "--pairs", "1", "--max-tax", "1%", "--dir", str(tmp_path / "t"), "--", *launch("slow")]
    assert command.run(argv) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["exit_code"], facts["verdict"], facts["max_tax"]) == (1, "inconclusive", 0.01)


def test_pairs_side_by_side_have_gpus_of_their_own_and_both_orders(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    outcome = measure("gpu", tmp_path, pairs=5, gpu_sets=("0,1", "2,3"))
    assert outcome.exit == Exit.SAME, outcome
    facts = outcome.facts
    assert [pair["gpus"] for pair in facts["pairs"]] == ["0,1", "2,3", "0,1", "2,3", "0,1"]
    assert facts["at_once"] == 2
    assert facts["tax"] == pytest.approx(0.1)
    ran = [line.split(" ...")[0] for line in capfd.readouterr().err.splitlines()]
    turns = [set(ran[at : at + 2]) for at in range(0, 8, 2)]
    assert turns == [
        {"baseline_1", "deterministic_2"},
        {"deterministic_1", "baseline_2"},
        {"deterministic_3", "baseline_4"},
        {"baseline_3", "deterministic_4"},
    ]
    assert ran[8:10] == ["baseline_5", "deterministic_5"]
    assert set(ran[10:]) == {"profile_baseline", "profile_deterministic"}
    ports = set()
    for name in ran:
        manifest = json.loads((tmp_path / name / "run" / "manifest.json").read_text())["launch"]
        number = name.rpartition("_")[2]
        place = int(number) - 1 if number.isdigit() else ("profile_baseline", "profile_deterministic").index(name)
        assert manifest["devices"] == ("0,1", "2,3")[place % 2]
        ports.add(manifest["port"])
    assert len(ports) > len(ran) / 2


def test_knobs_side_by_side_are_paired_on_their_gpus(tmp_path: Path):
    outcome = measure("gpu", tmp_path, pairs=2, gpu_sets=("0", "1"), ablate=True)
    rows = {row["knob"]: row for row in outcome.facts["ablation"]}
    assert rows["attention"]["tax"] == pytest.approx(1 / 0.95 - 1)
    assert len(rows["attention"]["step_s"]) == 2
    assert "exit code 1" in rows["other ops"]["note"]
    for name in ("attention_2", "deterministic_2", "collectives_2"):
        assert json.loads((tmp_path / name / "run" / "manifest.json").read_text())["launch"]["devices"] == "1"


def test_no_further_pairs_begin_that_would_be_over_too_late(tmp_path: Path):
    outcome = measure("steady", tmp_path, pairs=6, limit_s=0.0)
    assert len(outcome.facts["pairs"]) == 1
    assert outcome.verdict.endswith("(one pair: no interval), 1 of 6 pairs: no more fit into --limit-s 0")
    outcome = measure("steady", tmp_path / "all", pairs=2, limit_s=1000.0)
    assert outcome.facts["pairs"][1]["ratio"] and outcome.verdict.endswith("), 2 pairs")


@pytest.mark.parametrize("seconds", ["-3", "nan", "inf"])
def test_limits_that_are_no_time_are_refused(seconds: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        command.run(["tax", "--limit-s", seconds, "--", *launch("steady")])
    assert "seconds, at least 0" in capsys.readouterr().err


def test_more_pairs_at_once_than_gpus_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    many = "1000"
    with pytest.raises(SystemExit, match="2"):
        command.run(["tax", "--at-once", many, "--dir", str(tmp_path / "t"), "--", *launch("steady")])
    assert f"--at-once {many}: 1 to the number of GPUs" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_gpus_are_split_into_equal_sets_and_flags_are_left_out():
    assert split_gpus(["4", "5", "6", "7"], 2) == ["4,5", "6,7"]
    assert split_gpus(["0", "1", "2"], 2) == ["0", "1"]
    words = ["run", "--save", "x", "--lr=1", "--tensorboard-dir=t", "--async-save", "--save-interval", "3"]
    assert without(words, UNWRITTEN) == ["run", "--lr=1", "--save-interval", "3"]


@pytest.mark.slow
def test_real_run_is_measured(tmp_path: Path):
    flags = f"{TINY} --hybrid-layer-pattern ME*- --global-batch-size 2 --exit-interval 3"
    words = [sys.executable, str(ROOT / "pretrain_hybrid.py"), *flags.split()]
    outcome = tax(words, tmp_path, Request(pairs=1))
    assert outcome.exit == Exit.SAME, outcome
    facts = outcome.facts
    assert facts["deterministic"]["device"] == "cpu"
    assert facts["deterministic"]["ops"].keys() == facts["baseline"]["ops"].keys()
    assert facts["baseline"]["step_s"] > 0
    assert facts["baseline"]["peak_host_memory_bytes"] > 1 << 26
    assert facts["where"] is None
    profile = json.loads((tmp_path / "profile_deterministic/run/profile_rank_00000.json").read_text())
    assert profile["iterations"] == [2, 3]
