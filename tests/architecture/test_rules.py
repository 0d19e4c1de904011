"""Every rule holds in the tree, and every rule sees the breach planted for it."""

from __future__ import annotations

import pytest

from tests.architecture.boundaries import BOUNDARIES, LATE_IMPORTS
from tests.architecture.limits import LIMITS
from tests.architecture.rule import Rule
from tests.architecture.sources import files_with, parse

RULES = (*LIMITS, *BOUNDARIES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_holds(rule: Rule) -> None:
    findings = list(rule.findings(files_with(".py")))
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_sees_the_planted_breach(rule: Rule) -> None:
    assert rule.findings_in_plant()


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [
        ("broad-except", "megatron/a.py", "try:\n    f()\nexcept BaseException:\n    undo()\n    raise\n"),
        ("positional-parameters", "megatron/a.py", "def f(a, b, c, *, d, e, g, h): ...\n"),
        ("positional-parameters", "megatron/a.py", "@triton.jit\ndef k(a, b, c, d, e, f, g): ...\n"),
        ("annotations", "megatron/a.py", "class F(Function):\n    @staticmethod\n    def forward(ctx, x): ...\n"),
        ("late-import", "tools/progress.py", "def f():\n    import rich.progress\n"),
        ("backend-sum", "megatron/core/optimizer/x.py", "def f(sums, group, x):\n    sums.all_reduce(group, x)\n"),
        ("timed-or-atomic", "megatron/core/ops/x/fast.py", "import triton\n\nf = triton.autotune\n"),
        ("rerun", "megatron/a.py", "with rerun() as again:\n    with torch.enable_grad():\n        f()\n"),
    ],
)
def test_rule_leaves_the_permitted_form_alone(name: str, path: str, text: str) -> None:
    (rule,) = [rule for rule in RULES if rule.name == name]
    assert not list(rule.findings([parse(path, text)]))


def test_late_import_of_another_package_is_seen_in_an_allowed_file() -> None:
    (rule,) = [rule for rule in RULES if rule.name == "late-import"]
    assert "tools/progress.py" in LATE_IMPORTS
    assert list(rule.findings([parse("tools/progress.py", "def f():\n    import matplotlib\n")]))


def test_every_allowance_states_its_reason() -> None:
    allowances = {path: reason for rule in RULES for path, reason in rule.allowed.items()}
    late = {path: reason for path, (_, reason) in LATE_IMPORTS.items()}
    assert all(reason.strip() for reason in {**allowances, **late}.values())
