"""Variants of outside packages: loaded by the run that asked for one and by nobody else, and only in the mode and from
the version that their names and promises are about."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.config.numerics import NumericsConfig
from megatron.core.ops.outside import Outside, numbers
from megatron.core.ops.outside_versions import KNOWN_PATHS, known_path
from megatron.core.ops.registry import Case, Guarantee, Op, OpSpec, Tolerance, Variant, build_table
from megatron.training.setup.pinned_environment import PINS
from tests.architecture.sources import ROOT

CPU = torch.device("cpu")
PACKAGES = {
    "mamba_ssm": ("2.3.2.post1", "mamba_ssm/ops/triton/ssd_combined.py"),
    "causal_conv1d": ("1.7.0", "causal_conv1d/__init__.py"),
    "transformer_engine": ("2.20.2", "transformer_engine/pytorch/cpp_extensions/__init__.py"),
    "fused_weight_gradient_mlp_cuda": ("0.1", "fused_weight_gradient_mlp_cuda/__init__.py"),
}
"""Version and deepest module of empty packages that stand for the real ones: what is loaded and when is tested here,
what they compute in tests/gpu."""
CHOICES = {
    "ssd_scan=mamba_ssm_deterministic": "mamba_ssm",
    "causal_conv1d=causal_conv1d_deterministic": "causal_conv1d",
    "attention=te_attention_deterministic": "transformer_engine",
    "grouped_gemm=te_grouped": "transformer_engine",
    "grouped_grad=te_grouped": "transformer_engine",
    "linear_grad=apex": "fused_weight_gradient_mlp_cuda",
}

LOADING = """
import json, sys
import torch
from megatron.core.config.errors import ConfigError
from megatron.core.config.numerics import NumericsConfig
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import build_table
from megatron.training.setup.determinism import enter_deterministic_mode

packages, choices = json.loads(sys.argv[1])
loaded = lambda: sorted(set(packages) & set(sys.modules))
enter_deterministic_mode()
declared = sorted(f"{op.spec.name}={v.name}" for op in ALL_OPS for v in op.variants if v.outside and v.guarantee)
unasked = []
for device in ("cpu", "cuda"):
    for dtype in (torch.float32, torch.bfloat16):
        for strict in (True, False):
            numerics = NumericsConfig(deterministic_mode=strict)
            table = build_table(ALL_OPS, numerics, torch.device(device), dtype)
            unasked += [f"{op}={v.name}" for op, v in table.chosen.items() if v.outside]
steps, packaged = [("nothing", loaded())], {}
for choice in choices:
    numerics = NumericsConfig(deterministic_mode=True, op_variants=choice)
    table = build_table(ALL_OPS, numerics, torch.device("cuda"), torch.bfloat16)
    steps.append((choice, loaded()))
    packaged[choice] = table.manifest()[choice.partition("=")[0]]["package"]
print(json.dumps({"declared": declared, "unasked": unasked, "steps": steps, "packaged": packaged}))
"""


def _stand_ins(folder: Path) -> Path:
    for package, (version, deepest) in PACKAGES.items():
        path = folder / deepest
        path.parent.mkdir(parents=True)
        for parent in (path.parent, *path.parent.relative_to(folder).parents):
            (folder / parent / "__init__.py").touch()
        (folder / "__init__.py").unlink(missing_ok=True)
        path.touch()
        information = folder / f"{package}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return folder


def test_installed_packages_are_loaded_by_those_who_chose_them_and_never_taken_unasked(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name not in {pin.name for pin in PINS}}
    environment["PYTHONPATH"] = f"{_stand_ins(tmp_path)}:{ROOT}"
    command = [sys.executable, "-c", LOADING, json.dumps([list(PACKAGES), list(CHOICES)])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["declared"]) == {*CHOICES, *(c.removesuffix("_deterministic") for c in CHOICES)}
    assert found["unasked"] == []
    expected: set[str] = set()
    assert found["steps"][0] == ["nothing", []]
    for choice, loaded in found["steps"][1:]:
        expected.add(CHOICES[choice])
        assert loaded == sorted(expected)
        assert found["packaged"][choice] == f"{CHOICES[choice]} {PACKAGES[CHOICES[choice]][0]}"


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _outside(name: str, outside: Outside) -> Variant:
    level = Guarantee.RUN_TO_RUN if outside.deterministic else Guarantee.NONE
    return Variant(name=name, fn=double, guarantee={"cpu": level}, why="test", outside=outside)


def _table(numerics: NumericsConfig, *outside: Variant) -> dict[str, Variant]:
    """Chosen variants of an op of an own variant and outside ones."""
    own = Variant(name="deterministic", fn=double, guarantee={"cpu": Guarantee.RUN_TO_RUN}, why="test")
    spec = OpSpec(
        name="double",
        promise="doubles",
        order="none",
        cases=lambda generator, dtype, device: [Case(name="one", args=(torch.ones(1),))],
        tolerance={torch.float32: Tolerance(rtol=0.0, atol=0.0, reason="exact")},
    )
    return build_table([Op(spec=spec, variants=(*outside, own))], numerics, CPU, torch.float32).chosen


class Load:
    """Counts its calls; raises ``error`` if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls, self.error = 0, error

    def __call__(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


DETERMINISTIC = {"switch": "THEIR_SWITCH", "deterministic": True}


@pytest.mark.parametrize(
    ("strict", "further", "words"),
    [
        (False, DETERMINISTIC, ("without --deterministic-mode", "THEIR_SWITCH pinned", "change: --deterministic-mode")),
        (True, {"switch": "THEIR_SWITCH"}, ("with --deterministic-mode", "THEIR_SWITCH", "--no-deterministic-mode")),
        (True, {"at_least": "9999.1"}, ("with torch 2", "torch 9999.1 or later")),
    ],
    ids=["mode-not-pinned", "default-in-deterministic-mode", "version"],
)
def test_a_variant_that_would_not_be_what_its_name_says_is_refused_before_it_is_loaded(
    strict: bool, further: dict, words: tuple[str, ...]
):
    load = Load()
    variant = _outside("theirs", Outside(package="torch", load=load, **further))
    with pytest.raises(ConfigError) as error:
        _table(NumericsConfig(deterministic_mode=strict, op_variants="double=theirs"), variant)
    assert all(word in str(error.value) for word in ("--op-variants double=theirs", *words)), str(error.value)
    assert error.value.exit_code == 2
    assert load.calls == 0


def test_a_switch_that_the_launcher_may_set_is_not_pinned():
    load = Load()
    variant = _outside("theirs", Outside(package="torch", load=load, **DETERMINISTIC))
    allowed = NumericsConfig(
        deterministic_mode=True, op_variants="double=theirs", determinism_allow_env="OTHER, THEIR_SWITCH"
    )
    with pytest.raises(ConfigError, match="--determinism-allow-env THEIR_SWITCH"):
        _table(allowed, variant)
    assert load.calls == 0


def test_a_process_that_did_not_enter_deterministic_mode_is_refused():
    load = Load()
    variant = _outside("theirs", Outside(package="torch", load=load, **DETERMINISTIC))
    asked = NumericsConfig(deterministic_mode=True, op_variants="double=theirs")
    torch.use_deterministic_algorithms(False)
    with pytest.raises(ConfigError, match="enter_deterministic_mode"):
        _table(asked, variant)
    torch.use_deterministic_algorithms(True)
    assert load.calls == 0
    assert _table(asked, variant)["double"].name == "theirs"
    assert load.calls == 1


def test_refusals_quote_what_is_known_about_the_path():
    outside = Outside(package="torch", load=Load(), switch="MAMBA_DETERMINISTIC", deterministic=True)
    spec_name, name = "ssd_scan", "mamba_ssm_deterministic"
    row = known_path("ssd_scan=mamba_ssm")
    with pytest.raises(ConfigError) as error:
        spec = OpSpec(name=spec_name, promise="", order="", cases=lambda *given: [], tolerance={})
        op = Op(spec=spec, variants=(_outside(name, outside),))
        build_table([op], NumericsConfig(op_variants=f"{spec_name}={name}"), CPU, torch.float32)
    assert row is not None
    assert row.why in str(error.value)


@pytest.mark.parametrize("error", [ImportError("undefined symbol"), OSError("no library"), AttributeError("moved")])
def test_a_package_that_does_not_load_is_refused_by_name(error: Exception):
    variant = _outside("theirs", Outside(package="torch", load=Load(error)))
    with pytest.raises(ConfigError, match=f"double=theirs, whose package torch .* does not load: {error}"):
        _table(NumericsConfig(op_variants="double=theirs"), variant)


def test_only_the_mode_that_fits_is_taken_unasked():
    loads = Load(), Load()
    ordered = _outside("theirs_deterministic", Outside(package="torch", load=loads[0], **DETERMINISTIC))
    default = _outside("theirs", Outside(package="torch", load=loads[1], switch="THEIR_SWITCH"))
    for words in (None, "fastest"):
        strict = NumericsConfig(deterministic_mode=True, op_variants=words)
        assert _table(strict, default, ordered)["double"].name == "theirs_deterministic"
        assert _table(NumericsConfig(op_variants=words), ordered, default)["double"].name == "theirs"
    assert [load.calls for load in loads] == [2, 2]


def test_a_package_that_is_not_installed_is_named():
    outside = Outside(package="no_such_package", load=Load(), switch="THEIR_SWITCH")
    variant = Variant(name="theirs", fn=double, guarantee={}, why="test", outside=outside)
    with pytest.raises(ConfigError, match="variant theirs, whose package no_such_package is not installed"):
        _table(NumericsConfig(op_variants="double=theirs"), variant)
    assert not outside.installed
    assert _table(NumericsConfig(op_variants="fastest"), variant)["double"].name == "deterministic"


def test_versions_compare_by_their_numbers():
    assert numbers("2.3.2.post1") == (2, 3, 2)
    assert numbers("2.20.2+gabc") == (2, 20, 2)
    assert numbers("unknown") == ()
    assert Outside(package="no_such_package", load=Load()).version == "unknown"


def test_every_declared_variant_without_a_promise_has_its_row():
    manifest = json.loads((ROOT / "tests/golden/op_manifest.json").read_text("utf-8"))
    unpromised = {
        f"{op}={v['name']}"
        for op, variants in manifest.items()
        for v in variants
        if v["guarantee"].get("cuda") == "NONE"
    }
    assert unpromised == {variant for path in KNOWN_PATHS for variant in path.variants}
    assert all(path.why and path.instead and path.evidence for path in KNOWN_PATHS)


def test_switches_are_pinned_by_deterministic_mode():
    """What an outside variant counts on is what the mode sets, before that package is imported."""
    pinned = {pin.name: pin.read_by for pin in PINS if pin.value is not None}
    names = ("MAMBA_DETERMINISTIC", "CAUSAL_CONV1D_DETERMINISTIC", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    assert [pinned[name] for name in names] == ["mamba_ssm", "causal_conv1d", "transformer_engine"]
