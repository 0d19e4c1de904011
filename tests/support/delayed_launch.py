"""``pretrain_hybrid.py`` on ranks that come late: python -m tests.support.delayed_launch SEED FLAGS..."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.support.delays import delay_collectives

if __name__ == "__main__":
    delay_collectives(int(sys.argv[1]), int(os.environ["RANK"]))
    sys.argv = ["pretrain_hybrid.py", *sys.argv[2:]]
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "pretrain_hybrid.py"), run_name="__main__")
