"""The command line of megatron-determinism: usage errors are 2 and say what exists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.determinism import __main__ as command
from megatron.determinism.command_line import EXIT_CODES
from tests.support.fingerprints import record, write_folder
from tests.support.processes import ends, number_in
from tests.unit.determinism.test_verify import launch


def test_compare_prints_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folders = [str(write_folder(tmp_path / name, [record(1)])) for name in "ab"]
    assert command.run(["compare", *folders]) == 0
    assert capsys.readouterr().out.startswith("identical on all 1 common iteration (iteration 1)\n")


def test_verify_runs_what_follows_the_dashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command.run(["verify", "--dir", str(tmp_path), "--json", "--", *launch("steady")]) == 0
    assert json.loads(capsys.readouterr().out)["legs"] == 2


def test_kernels_check_runs_apart(capfd: pytest.CaptureFixture[str]):
    assert command.run(["kernels", "check", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["verdict"] == "same"


def test_checkpoint_of_nothing_is_3(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert command.run(["checkpoint", "verify", str(tmp_path), "--json"]) == 3
    assert json.loads(capfd.readouterr().out)["verdict"] == "damaged"


@pytest.mark.parametrize("name", EXIT_CODES)
def test_help_of_each_command_says_what_its_codes_mean(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.run([*name.split(), "--help"])
    assert f"Exit codes: {EXIT_CODES[name]}." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "{compare,verify,trace-compare,bisect,validate,replay,tax,checkpoint,kernels}"),
        (["bisect"], "bisect needs the command to run, after --"),
        (["trace-compare", "a"], "the following arguments are required: b"),
        (["compare", "a"], "required: b"),
        (["compare", "a", "b", "--", "c"], "compare takes no command after --"),
        (["compare", "a", "b", "--js"], "unrecognized arguments: --js"),
        (["verify"], "verify needs the command to run, after --"),
        (["tax"], "tax needs the command to run, after --"),
        (["tax", "--pairs", "0", "--", "true"], "--pairs 0: at least 1"),
        (["tax", "--warm-up", "-1", "--", "true"], "--warm-up -1: at least 0"),
        (["tax", "--max-tax", "much", "--", "true"], "much: a share such as 0.01, or 1%"),
        (["tax", "--max-tax", "inf", "--", "true"], "inf: a share"),
        (["verify", "--runs", "1", "--", "true"], "--runs 1: at least 2"),
        (["verify", "--resume-at", "3,x", "--", "true"], "3,x: ascending iterations from 1 on, separated by commas"),
        (["verify", "--resume-at", "9" * 5000, "--", "true"], "9... (5000 characters): ascending iterations"),
        (["replay", "--original", "a", "--iterations", "9" * 5000, "--", "true"], "9... (5000 characters): A:B"),
        (["verify", "--resume-at", "5,3", "--", "true"], "5,3: ascending iterations from 1 on"),
        (["verify", "--dir", __file__, "--", "true"], "which is a file: a folder that can be written, or a new one"),
        (["tax", "--dir", f"{__file__}/x", "--", "true"], "which lies below the file"),
        (["bisect", "--dir", __file__, "--", "true"], "which is a file"),
        (["bisect", "--against", "'open", "--", "true"], "'open: a command as a shell takes it (No closing quotation)"),
        (["validate", "a", "--against", " ", "--", "true"], "' ': a command"),
        (["replay", "--original", "a", "--iterations", "1", "--dir", "", "--", "true"], "'', which is empty"),
        (["checkpoint", "diff", "a"], "checkpoint diff: error: the following arguments are required: b"),
        (["checkpoint", "verify", "a", "b"], "unrecognized arguments: b"),
        (["kernels", "check", "--no-test-change", "x"], "unrecognized arguments: --no-test-change x"),
    ],
)
def test_wrong_usage(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        command.run(argv)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_console_script_ends_with_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["megatron-determinism", "compare", str(tmp_path), str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 3


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends processes with the one that started them")
def test_the_process_of_a_command_ends_with_it_when_it_is_killed(tmp_path: Path):
    python, number = tmp_path / "python", tmp_path / "number"
    python.write_text(f"#!/bin/sh\necho $$ > {number}\nexec sleep 900\n")
    python.chmod(0o755)
    program = "import sys; from megatron.determinism.__main__ import main; sys.executable = sys.argv.pop(1); main()"
    with subprocess.Popen([sys.executable, "-c", program, str(python), "checkpoint", "verify", "a"]) as outer:
        inner = number_in(number)
        outer.kill()
    assert ends(inner)


@pytest.mark.parametrize("name", ["compare", "verify", "bisect", "tax"])
def test_wrong_usage_shows_the_usage_of_the_command(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.run(["compare", "a", "b", "--", "c"] if name == "compare" else [name])
    assert capsys.readouterr().err.startswith(f"usage: megatron-determinism {name} ")
