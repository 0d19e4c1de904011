"""The contract on one host: what is launched, in which order, on which devices, what has to be equal, the report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron.determinism.compare import compare
from megatron.training.cli.parser import parse_run_config
from megatron.training.config.validate import resolve_and_validate
from tests.architecture.sources import ROOT
from tests.support.legs import leg
from tests.support.ranks import run_ranks
from tools.bench.one_node import chosen
from tools.bench.one_node_gate import Gate
from tools.bench.one_node_plan import FIRST, MODEL, NATIVE_SUMS, SHARED, TINY, flags_of, plan, proxies
from tools.bench.one_node_report import NAME, missing_of, rows_of, table, verdict, write_report

STEPS, STOP = 50, 20
WANTED = {
    2: ["DP2", "TP2+SP, EP2", "EP2", "TP2+SP", "PP2", "PP2xVPP2"],
    4: ["DP4", "TP2+SP, EP2, DP2", "TP2xPP2xEP2", "EP4", "TP4+SP", "PP4", "PP4xVPP2"],
    8: ["DP8", "TP2xPP2xEP2xDP2", "TP2+SP, EP4, DP4", "EP8", "TP4+SP, DP2", "PP4, DP2", "PP4xVPP2, DP2"],
}


@pytest.mark.parametrize("gpus", WANTED)
def test_layouts_by_number_of_gpus(gpus: int) -> None:
    launches = plan(gpus, STEPS, STOP).launches
    assert [launch.layout.name for launch in launches if launch.role == FIRST] == WANTED[gpus]
    assert len({launch.name for launch in launches}) == len(launches)
    for launch in launches:
        assert len(set(launch.devices)) == launch.layout.ranks <= gpus
    others = [launch.name for launch in launches if launch.role.startswith("from")]
    assert (
        others
        == {
            2: ["DP1: from DP2"],
            4: ["DP2: from DP4", "DP1: from DP2", "PP2, DP2: from PP4"],
            8: ["DP4: from DP8", "DP2: from DP4", "PP2, DP4: from PP4, DP2"],
        }[gpus]
    )
    assert bool(plan(gpus, STEPS, STOP).left_out) == (gpus < 8)


@pytest.mark.parametrize("gpus", WANTED)
def test_launches_go_on_where_their_source_stopped_and_are_compared_within_a_recipe(gpus: int) -> None:
    launches = {launch.name: launch for launch in plan(gpus, STEPS, STOP).launches}
    begun: list[str] = []
    for name, launch in launches.items():
        source = launches.get(launch.source or "")
        assert launch.first == (1 if source is None else source.last + 1)
        assert source is None or (source.saved and source.name in begun)
        other = launches.get(launch.against or "")
        assert other is None or (
            other.layout.recipe == launch.layout.recipe and (other.first, other.last) == (1, STEPS)
        )
        begun.append(name)
    alone = Counter(launch.layout.recipe.name for launch in launches.values() if launch.against is None)
    assert set(alone.values()) == {1}
    (control,) = [launch for launch in launches.values() if not launch.same]
    assert control.flags == NATIVE_SUMS
    straight = launches[f"{control.layout.name}: {FIRST}"]
    assert straight.devices == tuple(range(gpus))
    assert launches[f"{control.layout.name}: stopped"].devices == straight.devices[::-1]
    assert launches[f"{control.layout.name}: gone on with"].devices == (*straight.devices[1:], 0)


@pytest.mark.parametrize("sizes", [MODEL, SHARED])
@pytest.mark.parametrize("gpus", WANTED)
def test_every_command_line_is_accepted(gpus: int, sizes: str) -> None:
    for launch in plan(gpus, STEPS, STOP).launches:
        config = resolve_and_validate(parse_run_config(flags_of(launch, STEPS, sizes)), launch.layout.ranks)
        assert config.numerics.deterministic_mode
        assert config.training.exit_interval == (launch.last if launch.last < STEPS else None)


@pytest.mark.parametrize("gpus", WANTED)
def test_every_proxy_is_accepted(gpus: int) -> None:
    for launch in proxies(gpus, 2):
        command = ["env", "LAUNCHER=echo", f"GPUS={gpus}", "bash", "examples/nemotron3_nano_proxy.sh"]
        command += [*flags_of(launch, STEPS), "--run-dir", "run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        config = resolve_and_validate(parse_run_config(done.stdout.split()[1:]), gpus)
        assert config.model.num_moe_experts == 128


@pytest.mark.parametrize(("gpus", "steps", "stop"), [(3, 50, 20), (4, 50, 49), (4, 50, 0)])
def test_impossible_plans_are_refused(gpus: int, steps: int, stop: int) -> None:
    with pytest.raises(ValueError, match="GPUs: 2, 4 or 8|a stop after iteration"):
        plan(gpus, steps, stop)


def test_chosen_layouts_bring_what_they_need() -> None:
    names = [launch.name for launch in chosen(plan(4, STEPS, STOP), "PP2, DP2: from")]
    assert names == ["DP4: first", "PP4: stopped", "PP4: first", "PP2, DP2: from PP4"]


def test_a_device_is_held_by_one_launch_at_a_time_and_others_are_free(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    gates = {}
    for name, devices in {"wide": "01", "late": "12", "beside": "23", "second": "01"}.items():
        (tmp_path / name).mkdir()
        gates[name] = Gate(tmp_path / "locks", tmp_path / name, list(devices), 1)
    assert gates["wide"]._take(0)
    assert not gates["late"]._take(0)
    assert gates["beside"]._take(0)
    gates["wide"].leave(0)
    assert gates["second"]._take(0)
    gates["beside"].leave(0)
    assert not gates["late"]._take(0)


def launched(**more: object) -> dict[str, object]:
    facts = {"layout": "DP4", "recipe": "data", "ranks": 4, "role": FIRST, "devices": [0, 1, 2, 3], "proxy": False}
    facts |= {"iterations": [1, 50], "against": None, "same": True, "status": "ran", "seconds": 40.0, "good": None}
    return {**facts, "seen": "", "step_ms": 100.0, "peak_memory_bytes": None, **more}


def test_report_says_what_was_kept_broken_and_not_run(tmp_path: Path) -> None:
    launches = {
        "DP4: first": launched(),
        "DP4: again": launched(role="again", against="DP4: first", good=True, seen="identical"),
        "DP4: stopped": launched(role="stopped", against="DP4: first", good=False, seen="different: at iteration 3"),
        "DP4: gone on with": launched(role="gone on with", status="not run", seen="no time left", step_ms=None),
        "DP2: from DP4": launched(layout="DP2", role="from DP4", against="DP4: first", good=True, iterations=[21, 35]),
        "DP4: the backend's sums": launched(role="the backend's sums", same=False, good=True, seen="different: first"),
    }
    facts = {"launches": launches, "gpus": 4, "devices": 4, "place": "4 x GPU", "torch": "2", "steps": 50, "stop": 20}
    facts |= {"seconds": 9.0, "left_out": ["EP8 (8 GPUs)"]}
    (row,) = rows_of(facts)
    assert [text for text, _ in row] == ["DP4", "4", "identical, 1 to 50", "DIFFERENT", "not run", "", "100 ms"]
    assert [good for _, good in row[2:5]] == [True, False, None]
    assert verdict(facts).startswith("3 comparisons as promised, 1 not; 1 launches not run")
    assert missing_of(facts) == ["DP4: gone on with: no time left", "EP8 (8 GPUs): 4 GPUs are too few"]
    assert "BAD DP4: stopped:\n    different: at iteration 3" in table(facts)
    write_report(tmp_path, facts)
    page = (tmp_path / f"{NAME}.md").read_text()
    assert "| DP2: from DP4 | identical, 21 to 35, to DP4 |" in page
    assert (tmp_path / f"{NAME}.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gpus", [2, 4])
def test_every_launch_is_as_planned_on_the_cpu(gpus: int, tmp_path: Path) -> None:
    launches = plan(gpus, 5, 2).launches
    folders = {launch.name: tmp_path / str(number) for number, launch in enumerate(launches)}
    for launch in launches:
        flags = [*flags_of(launch, 5, TINY), "--fingerprint-dir", str(folders[launch.name] / "fingerprint")]
        if launch.saved:
            flags += ["--save", str(folders[launch.name] / "checkpoints"), "--save-interval", "1000"]
        if launch.source:
            flags += ["--load", str(folders[launch.source] / "checkpoints"), "--exit-on-missing-checkpoint"]
        ended = run_ranks(launch.layout.ranks, leg, " ".join(flags))
        assert all(rank.code == 0 for rank in ended), ended[0].error
    for launch in launches:
        if launch.against:
            sides = [folders[name] / "fingerprint" for name in (launch.against, launch.name)]
            outcome = compare(*sides, force=not launch.same)
            assert outcome.exit == (0 if launch.same else 1), (launch.name, outcome)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_ends_well(tmp_path: Path) -> None:
    words = ["--gpus", "2", "--tiny", "--steps", "4", "--stop", "2", "--at-once", "2", "--only", "DP1;sums"]
    command = [sys.executable, "-m", "tools.bench.one_node", "--out", str(tmp_path), *words, "--limit-s", "800"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / f"{NAME}.json").read_text())
    assert {name: launch["good"] for name, launch in facts["launches"].items()} == {
        "DP2: first": None,
        "DP2: stopped": True,
        "DP1: from DP2": True,
        "DP2: the backend's sums": True,
    }
