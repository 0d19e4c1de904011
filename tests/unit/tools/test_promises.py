"""Every promise of docs/determinism.md names a test and a control that exist."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.sources import ROOT
from tools.docs.promises import LEVELS, PROMISES, Promise


def _exists(name: str) -> bool:
    path, _, function = name.partition("::")
    file = ROOT / "tests" / path
    return file.is_file() and any(
        isinstance(node, ast.FunctionDef) and node.name == function for node in ast.parse(file.read_text()).body
    )


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.test.split("::")[1])
def test_test_and_control_exist(promise: Promise) -> None:
    assert _exists(promise.test), promise.test
    assert _exists(promise.control), promise.control


def test_every_level_is_promised_and_no_other() -> None:
    assert {promise.level for promise in PROMISES} == set(LEVELS)


def test_a_test_that_is_not_there_is_noticed() -> None:
    assert not _exists("unit/tools/test_promises.py::test_that_nobody_wrote")
    assert not _exists("unit/tools/test_nowhere.py::test_x")
