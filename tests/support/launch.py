"""Start the training script in fresh processes, as a user does."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.ranks import run_ranks
from tests.support.training import TINY

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "pretrain_hybrid.py"


def launch(
    ranks: int,
    flags: str,
    *,
    without: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    launcher: tuple[str, ...] = (),
    timeout_s: float = 110,
) -> subprocess.CompletedProcess[str]:
    """``pretrain_hybrid.py`` with the tiny recipe (``without`` some of its switches) and further flags: plain Python
    for one rank, else torchrun with its own flags ``launcher``."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *launcher]
    command += [SCRIPT, *_words(flags, without)]
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


def launch_forked(flags: str, *, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The same script with the same command line on one rank, in a process that has loaded everything already: for what
    does not depend on the start of Python, at a fifth of the time."""
    (ended,) = run_ranks(1, _run_script, _words(flags, without))
    return ended


def _words(flags: str, without: tuple[str, ...]) -> list[str]:
    return [word for word in shlex.split(TINY) if word not in without] + shlex.split(flags)


def _run_script(words: list[str]) -> subprocess.CompletedProcess[str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    sys.argv = [SCRIPT, *words]
    out, error, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            runpy.run_path(str(ROOT / SCRIPT), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), error.getvalue())
