"""The oracle runs on the CPU; its packages (extra ``oracle``) are not on every GPU machine."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out of ``-m gpu`` before a module of it is imported."""
    return True if config.getoption("markexpr") == "gpu" else None
