"""`kvmesh profile` on real checkpoints; what it writes is read by plans and simulations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmesh.cli import plan, profile, simulate
from kvmesh.cli.profile import warning_of
from kvmesh.core.errors import ConfigError
from kvmesh.sim.cost_fit import Fit
from kvmesh.sim.profile_file import load_profile
from tests.integration.families import Checkpoint
from tests.mesh_processes import MODEL_FOLDER

SMALL = ["--lengths", "8,32,96", "--cached", "0,32", "--batches", "1,3", "--contexts", "16,64"]
QUICK = [*SMALL, "--repeats", "1", "--num-blocks", "64"]


def test_the_embedded_model_is_profiled_planned_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "pydoc.json", tmp_path / "pydoc.png"
    flags = ["--model", str(MODEL_FOLDER), "--out", str(out), "--plot", str(plot)]
    assert profile.main([*flags, *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "prefill:" in shown
    assert "±" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")

    read = load_profile(str(out))
    device = read.devices["cpu"]
    assert 0 < device.prefill_s(8) <= device.prefill_s(96)
    assert 0 < device.decode.step_s(1, 16) <= device.decode.step_s(3, 300)
    assert device.decode_slots == 3
    assert read.kv_bytes(64) == 2 * read.kv_bytes(32)
    measured = json.loads(out.read_text())["measured"]
    assert [(each["tokens"], each["cached"]) for each in measured["prefill"]] == [
        (8, 0),
        (32, 0),
        (96, 0),
        (8, 32),
        (32, 32),
        (96, 32),
    ]
    assert len(measured["decode"]) == 4
    assert len(measured["prefill"][0]["runs"]) == 1
    assert measured["decode_fit"]["prediction_error"] >= 0
    assert "90% of fresh runs" in measured["errors"]["prediction_error"]

    assert plan.main(["--profile", str(out)]) == 0
    fleet = "home:cpu:prefill:1,home:cpu:decode:1"
    assert simulate.main(["--profile", str(out), "--fleet", fleet, "--requests", "20"]) == 0
    assert "kvmesh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "groups"), [("gemma3", {"full", "window 40"}), ("qwen3-next", {"full", "state"})]
)
def test_kv_of_every_group_is_told(family: str, groups: set[str], tmp_path: Path) -> None:
    checkpoint = Checkpoint(family, tmp_path / "model")
    out = tmp_path / "profile.json"
    flags = ["--model", str(checkpoint.folder), "--out", str(out), *QUICK]
    assert profile.main([*flags, "--num-blocks", "256", "--cuda-graphs", "on"]) == 0
    points = json.loads(out.read_text())["measured"]["kv_bytes"]
    assert set(points) == groups | {"total"}
    grown = {name: dict(pairs) for name, pairs in points.items()}
    short, long = 96, 128
    assert grown["full"][long] > grown["full"][short]
    assert grown["total"][short] == sum(grown[name][short] for name in groups)
    bounded = (groups - {"full"}).pop()
    assert grown[bounded][long] == pytest.approx(grown[bounded][short], rel=0.35)


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        profile.main([])
    flags = ["--model", str(MODEL_FOLDER), "--out", str(tmp_path / "x.json"), "--repeats", "1"]
    with pytest.raises(ConfigError, match="no length fits"):
        profile.main([*flags, "--lengths", "99999997,99999998"])
    with pytest.raises(ConfigError, match="2 samples, the fit needs 3"):
        profile.main([*flags, "--lengths", "8,16", "--cached", "0", "--batches", "1"])


@pytest.mark.parametrize(("error", "warns"), [(None, False), (0.1, False), (3.0, True)])
def test_what_a_busy_machine_measured_is_said_to_be_no_help(
    error: float | None, warns: bool
) -> None:
    fit = Fit((1.0,), (0.1,), relative_error=0.1, prediction_error=error)
    assert bool(warning_of(fit)) is warns
