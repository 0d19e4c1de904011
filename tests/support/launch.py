"""Start the training script in fresh processes, as a user does."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.training import TINY

ROOT = Path(__file__).resolve().parents[2]


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
    recipe = [word for word in shlex.split(TINY) if word not in without]
    command += ["pretrain_hybrid.py", *recipe, *shlex.split(flags)]
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
