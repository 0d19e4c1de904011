"""compare: exit 0, 1, 2 and 3, what each one says, and that nothing slips through."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.determinism.compare import compare
from megatron.determinism.report import Exit, Outcome
from tests.support.cpu_time import cpu_of_children_s
from tests.support.fingerprints import record, write_folder
from tests.support.settings import effective

STEPS = range(1, 6)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "a", [record(i) for i in STEPS])


def other(plain: Path, *flags: str, changes: dict[int, dict] | None = None, steps=STEPS) -> Path:
    records = [record(i, **(changes or {}).get(i, {})) for i in steps]
    return write_folder(plain.parent / "b", records, effective(*flags) if flags else None)


def as_json(outcome: Outcome) -> dict:
    out = io.StringIO()
    assert outcome.print(out, as_json=True) == outcome.exit
    assert out.getvalue().count("\n") == 1
    return json.loads(out.getvalue())


def test_identical(plain: Path):
    outcome = compare(plain, other(plain))
    assert outcome.exit == Exit.SAME == 0
    assert outcome.verdict == "identical on all 5 common iterations (iterations 1 to 5)"
    facts = as_json(outcome)
    assert (facts["common_iterations"], facts["first_difference"], facts["exit_code"]) == (5, None, 0)
    assert "params" in facts["compared_fields"] and "z_loss" not in facts["compared_fields"]


def test_one_flipped_bit_of_a_digest(plain: Path):
    flipped = f"{4 ^ 1:032x}"
    outcome = compare(plain, other(plain, changes={4: {"params": flipped}, 5: {"lm_loss": 9.0}}))
    assert outcome.exit == Exit.DIFFERENT == 1
    assert outcome.verdict == "different: first at iteration 4, in params"
    assert f"  params: {4:032x} in A, {flipped} in B" in outcome.details
    difference = as_json(outcome)["first_difference"]
    assert difference == {"iteration": 4, "fields": {"params": {"a": f"{4:032x}", "b": flipped}}}


def test_last_bit_of_a_loss_and_the_sign_of_zero(plain: Path):
    outcome = compare(plain, other(plain, changes={2: {"lm_loss": 2.5000000000000004, "data": "0" * 32}}))
    assert outcome.verdict == "different: first at iteration 2, in lm_loss, data"
    assert (
        "  lm_loss: 0x1.4000000000000p+1 (2.5) in A, 0x1.4000000000001p+1 (2.5000000000000004) in B" in outcome.details
    )


def edited(plain: Path, change: Callable[[dict], object]) -> Path:
    """The same run with another manifest."""
    right = other(plain)
    manifest = json.loads((right / "manifest.json").read_text())
    change(manifest)
    (right / "manifest.json").write_text(json.dumps(manifest))
    return right


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("device", "name", "NVIDIA H100"),
        ("device", "instruction_set", "AVX512"),
        ("device", "driver", "999.9"),
        ("versions", "torch", "2.12.0"),
        ("versions", "triton", "3.7.0"),
        ("ops", "rms_norm", {"variant": "fast", "guarantee": "NONE", "source": "11"}),
    ],
)
def test_another_device_library_or_op_is_named(plain: Path, part: str, key: str, value: object):
    outcome = compare(plain, edited(plain, lambda manifest: manifest["trajectory"][part].update({key: value})))
    assert outcome.exit == Exit.NOT_COMPARABLE
    assert outcome.details
    assert all(line.startswith(f"  {part}.{key}") and " in A, " in line for line in outcome.details)


def test_another_machine_is_comparable(plain: Path):
    machine = {"host": "b", "driver": "1", "gpus": [], "topology": [["X"]], "container": {"kind": "docker"}}
    right = edited(plain, lambda manifest: manifest["launches"][0].update(hosts=["b"], machines=[machine]))
    assert compare(plain, right).exit == Exit.SAME


@pytest.mark.parametrize(
    ("flags", "field"),
    [(["--seed", "7"], "seed"), (["--lr", "2e-3"], "recipe.optimizer.lr"), (["--bf16"], "recipe.model.bf16")],
)
def test_other_inputs_are_named_by_flag_and_not_comparable_unless_forced(plain: Path, flags: list[str], field: str):
    right = other(plain, *flags, changes={1: {"grad_norm": 2.0}})
    outcome = compare(plain, right)
    assert outcome.exit == Exit.NOT_COMPARABLE == 2
    assert outcome.verdict.startswith("not comparable: 1 fixed input differs (A = ")
    assert outcome.details[0].startswith(f"  {field} ({flags[0]}): ") and len(outcome.details) == 1
    found = as_json(outcome)["differing_inputs"][0]
    assert (found["field"], found["flag"]) == (field, flags[0])
    forced = compare(plain, right, force=True)
    assert forced.exit == Exit.DIFFERENT
    assert forced.details[0] == "compared although 1 fixed input differs (--force)"
    assert outcome.details[0] in forced.details


def test_settings_that_should_move_no_bit_are_named_where_bits_differ(plain: Path):
    right = other(plain, "--ddp-bucket-size", "9", "--log-interval", "2", changes={2: {"grad_norm": 2.0}})
    outcome = compare(plain, right)
    assert outcome.exit == Exit.DIFFERENT
    assert [s["flag"] for s in as_json(outcome)["differing_settings"]] == ["--ddp-bucket-size"]
    assert "  layout.ddp.ddp_bucket_size (--ddp-bucket-size): 40000000 in A, 9 in B" in outcome.details


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": "f" * 32, "lm_loss": 2.0}, "the runs read other batches"),
        ({"learning_rate": 2.0, "params": "f" * 32}, "the schedules differ"),
        ({"mtp_losses": (2.0,), "grad_norm": 2.0}, "a loss differs"),
        ({"grad_norm": 2.0, "exp_avg": "f" * 32}, "the losses agree, so a backward"),
        ({"exp_avg": "f" * 32}, "losses and gradient norm agree"),
    ],
)
def test_what_to_do_next_follows_from_what_a_step_makes_first(tmp_path: Path, changes: dict, said: str):
    plain = {"mtp_losses": (1.0,)}
    sides = [
        write_folder(tmp_path / name, [record(1, **each)]) for name, each in (("a", plain), ("b", plain | changes))
    ]
    outcome = compare(*sides)
    assert as_json(outcome)["next_action"].startswith(said)
    out = io.StringIO()
    outcome.print(out, as_json=False)
    assert out.getvalue().endswith(f"\n  next: {outcome.next_action}\n")


def test_layouts_compare(plain: Path):
    outcome = compare(plain, other(plain, "--use-distributed-optimizer", "--ddp-bucket-size", "9"))
    assert outcome.exit == Exit.SAME
    assert not any("bucket" in line for line in outcome.details)


def test_only_common_iterations_count_and_the_rest_is_said(plain: Path):
    outcome = compare(plain, other(plain, steps=range(4, 9)))
    assert outcome.verdict == "identical on all 2 common iterations (iterations 4 to 5)"
    assert "  A has 3 more iterations (iterations 1 to 5 in all)" in outcome.details
    assert "  B has 3 more iterations (iterations 4 to 8 in all)" in outcome.details


def test_nothing_in_common_is_not_comparable(plain: Path):
    outcome = compare(plain, other(plain, steps=range(6, 8)))
    assert outcome.exit == Exit.NOT_COMPARABLE
    assert "no iteration in common (A: iterations 1 to 5 and B: iterations 6 to 7)" in outcome.verdict


def test_a_run_without_a_step_is_named_as_empty(plain: Path):
    empty = other(plain, steps=())
    for pair, name in (((plain, empty), "B"), ((empty, plain), "A")):
        outcome = compare(*pair)
        assert outcome.exit == Exit.NOT_COMPARABLE
        assert f"not comparable: {name} = {empty / 'fingerprint.jsonl'} is empty" in outcome.verdict
    assert " and B = " in compare(empty, empty).verdict and " are empty" in compare(empty, empty).verdict


def test_levels_compare_on_what_both_have(plain: Path):
    metrics_only = dict.fromkeys(("params", "main_params", "exp_avg", "exp_avg_sq", "rng", "data"))
    outcome = compare(plain, other(plain, changes=dict.fromkeys(STEPS, metrics_only)))
    assert outcome.exit == Exit.SAME
    assert outcome.details == ("  compared: lm_loss, load_balancing_loss, grad_norm, learning_rate",)


@pytest.mark.parametrize("name", ["manifest.json", "fingerprint.jsonl"])
@pytest.mark.parametrize("harm", ["missing", "cut", "garbled"])
def test_missing_or_damaged_file_is_named(plain: Path, name: str, harm: str):
    right = other(plain)
    path = right / name
    if harm == "missing":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    else:
        path.write_bytes(path.read_bytes().replace(b":", b";", 1))
    for a, b in ((plain, right), (right, plain)):
        outcome = compare(a, b)
        assert outcome.exit == Exit.DAMAGED == 3
        assert str(path) in outcome.verdict
        assert as_json(outcome)["verdict"] == "damaged"


def test_folder_that_is_not_there(plain: Path):
    assert compare(plain, plain.parent / "nowhere").exit == Exit.DAMAGED


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_on_a_terminal_only(plain: Path):
    outcome = compare(plain, other(plain))
    screen, file = Terminal(), io.StringIO()
    outcome.print(screen, as_json=False)
    outcome.print(file, as_json=False)
    assert "\033[" in screen.getvalue() and "\033[" not in file.getvalue()
    assert file.getvalue().startswith("identical on all 5 common iterations")


def test_command_is_fast_and_loads_no_torch(plain: Path):
    right = other(plain)
    code = (
        "import sys\nfrom megatron.determinism.__main__ import run\n"
        "code = run(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    before = cpu_of_children_s()
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", str(plain), str(right), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert cpu_of_children_s() - before < 2.0
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "same"


def test_a_trace_folder_is_told_apart(plain: Path):
    traced = edited(plain, lambda manifest: manifest.update(trace={"format": 2}))
    assert "is a trace folder, which trace-compare takes" in compare(traced, plain).verdict
