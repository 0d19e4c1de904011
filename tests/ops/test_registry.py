"""Which variant a run gets, and that a promise nobody keeps stops it."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.config.numerics import NumericsConfig
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.ranking import RANKING, fastest_first
from megatron.core.ops.registry import Case, Guarantee, Op, OpSpec, Tolerance, Variant, build_table
from megatron.training.setup.determinism import kept_promise
from tests.architecture.sources import ROOT

CPU = torch.device("cpu")
STRICT = NumericsConfig(deterministic_mode=True)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _variant(name: str, cpu: Guarantee | None, **changes) -> Variant:
    guarantee = {"cuda": Guarantee.LAYOUT} if cpu is None else {"cpu": cpu}
    return Variant(name=name, fn=double, guarantee=guarantee, why="test", **changes)


def _op(*variants: Variant) -> Op:
    tolerance = {torch.float32: Tolerance(rtol=0.0, atol=0.0, reason="exact")}
    spec = OpSpec(
        name="double",
        promise="doubles",
        order="none",
        cases=lambda generator, dtype, device: [Case(name="one", args=(torch.ones(1),))],
        tolerance=tolerance,
    )
    return Op(spec=spec, variants=variants)


def test_strict_runs_skip_what_promises_nothing():
    op = _op(_variant("fast", Guarantee.NONE), _variant("deterministic", Guarantee.RUN_TO_RUN))
    assert build_table([op], STRICT, CPU, torch.float32).chosen["double"].name == "deterministic"
    assert build_table([op], NumericsConfig(), CPU, torch.float32).chosen["double"].name == "fast"
    for words in ("fastest", "double=fastest", "fastest,double=fast"):
        fastest = NumericsConfig(deterministic_mode=True, op_variants=words)
        assert build_table([op], fastest, CPU, torch.float32).promise == Guarantee.NONE
    pinned = NumericsConfig(deterministic_mode=True, op_variants="fastest,double=deterministic")
    assert build_table([op], pinned, CPU, torch.float32).chosen["double"].name == "deterministic"


def test_fastest_goes_by_the_table_and_then_by_the_order_of_the_op(monkeypatch: pytest.MonkeyPatch):
    names = ["a", "b", "c", "d"]
    monkeypatch.setattr("megatron.core.ops.ranking.RANKING", {("double", "GPU 1"): ("gone", "c", "b")})
    assert fastest_first("double", "GPU 1", names) == ["c", "b", "a", "d"]
    assert fastest_first("double", "GPU 2", names) == names
    monkeypatch.setattr("megatron.core.ops.ranking.RANKING", {("double", "cpu"): ("deterministic", "fast")})
    op = _op(_variant("fast", Guarantee.NONE), _variant("deterministic", Guarantee.RUN_TO_RUN))
    table = build_table([op], NumericsConfig(op_variants="fastest"), CPU, torch.float32)
    assert table.chosen["double"].name == "deterministic"


def test_ranked_variants_are_declared():
    manifest = json.loads((ROOT / "tests/golden/op_manifest.json").read_text("utf-8"))
    declared = {op: {variant["name"] for variant in variants} for op, variants in manifest.items()}
    assert [row for row in RANKING if not set(RANKING[row]) <= declared[row[0]]] == []


@pytest.mark.parametrize(
    ("words", "native"),
    [
        (None, False),
        ("fastest", True),
        ("float_sums=native", True),
        ("double=fast", False),
        ("fastest,float_sums=ordered", False),
    ],
)
def test_sums_over_ranks_are_the_backends_only_where_asked_for(words: str | None, native: bool):
    numerics = NumericsConfig(deterministic_mode=True, op_variants=words)
    assert numerics.native_sums == native
    op = _op(_variant("deterministic", Guarantee.RUN_TO_RUN), _variant("fast", Guarantee.NONE))
    build_table([op], numerics, CPU, torch.float32)
    assert kept_promise(numerics, Guarantee.RUN_TO_RUN) == ("NONE" if native else "RUN_TO_RUN")


@pytest.mark.parametrize(
    "variants",
    [
        (_variant("fast", Guarantee.NONE),),
        (_variant("elsewhere", None),),
        (_variant("bf16", Guarantee.LAYOUT, dtypes=frozenset({torch.bfloat16})),),
        (),
    ],
    ids=["no-promise", "other-device", "other-type", "nothing"],
)
def test_a_promise_nobody_keeps_stops_the_run(variants):
    with pytest.raises(ConfigError, match="op double on cpu") as error:
        build_table([_op(*variants)], STRICT, CPU, torch.float32)
    assert error.value.exit_code == 2


def test_overrides_name_an_op_and_a_variant():
    op = _op(_variant("deterministic", Guarantee.RUN_TO_RUN), _variant("fast", Guarantee.NONE))
    chosen = NumericsConfig(deterministic_mode=True, op_variants="double=fast")
    assert build_table([op], chosen, CPU, torch.float32).promise == Guarantee.NONE
    for wrong in ("double=slow", "triple=fast", "double", "float_sums=fast"):
        with pytest.raises(ConfigError):
            build_table([op], NumericsConfig(op_variants=wrong), CPU, torch.float32)


def test_an_override_that_cannot_run_here_is_refused():
    op = _op(_variant("deterministic", Guarantee.RUN_TO_RUN), _variant("elsewhere", None))
    elsewhere = NumericsConfig(deterministic_mode=True, op_variants="double=elsewhere")
    with pytest.raises(ConfigError, match=r"variant elsewhere; there is .*; change: --op-variants double=\.\.\.$"):
        build_table([op], elsewhere, CPU, torch.float32)


def test_a_variant_gets_no_heads_of_a_width_it_does_not_take():
    op = _op(_variant("narrow", Guarantee.LAYOUT, head_widths=range(8, 129, 8)), _variant("all", Guarantee.LAYOUT))
    for width, name in ((None, "narrow"), (8, "narrow"), (128, "narrow"), (4, "all"), (20, "all"), (136, "all")):
        assert build_table([op], STRICT, CPU, torch.float32, width).chosen["double"].name == name
    asked = NumericsConfig(op_variants="double=narrow")
    with pytest.raises(ConfigError, match=r"with heads of width 20; .*variant narrow; there is all \(LAYOUT\)"):
        build_table([op], asked, CPU, torch.float32, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_can_keep_the_promise(device, dtype):
    table = build_table(ALL_OPS, STRICT, torch.device(device), dtype)
    assert set(table.chosen) == {op.spec.name for op in ALL_OPS}
    assert table.promise >= Guarantee.RUN_TO_RUN
    manifest = table.manifest()
    assert all(len(entry["source"]) == 16 for entry in manifest.values())


def test_the_reference_comes_last_and_runs_everywhere():
    for op in ALL_OPS:
        names = [v.name for v in op.variants]
        assert names[-1] == "reference"
        assert len(set(names)) == len(names)
        assert set(op.variants[-1].guarantee) == {"cpu", "cuda"}
        own = [v.name for v in op.variants if v.outside is None]
        assert all(name.startswith(("deterministic", "fast", "reference")) for name in own)


def test_variants_of_an_op_have_one_signature():
    """A module may be given any of them."""
    for op in ALL_OPS:
        parameters = [inspect.signature(variant.fn).parameters.values() for variant in op.variants]
        signatures = {tuple((p.name, p.kind, p.default) for p in each) for each in parameters}
        assert len(signatures) == 1, op.spec.name
