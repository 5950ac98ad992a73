"""An engine's threads: how many, and how they wait, of which OpenMP is told when it is loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.runtime import worker_runner
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_runner import find_folder, load_runner, shared_cores
from tests.unit.engine.tiny_checkpoint import write_checkpoint

_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
_LOAD = """
import sys
import kvmesh.runtime.worker
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_runner import load_runner

load_runner(EngineSection(model=sys.argv[1], num_blocks=8)).close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP elsewhere")
@pytest.mark.parametrize(
    ("given", "looks"),
    [({}, "300"), ({"GOMP_SPINCOUNT": "500"}, "500"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
    ids=str,
)
def test_threads_look_briefly_unless_the_environment_says_otherwise(
    tmp_path: Path, given: dict[str, str], looks: str
) -> None:
    rest = {name: value for name, value in os.environ.items() if name not in _WAITING}
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(write_checkpoint(tmp_path))],
        env=rest | given | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"GOMP_SPINCOUNT = '{looks}'" in done.stderr


@pytest.mark.parametrize(("threads", "warnings"), [(2, 0), (3, 1)])
def test_more_threads_than_cores_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    threads: int,
    warnings: int,
) -> None:
    monkeypatch.setattr(worker_runner, "usable_cores", lambda: 2)
    folder = str(write_checkpoint(tmp_path))
    with caplog.at_level("WARNING"):
        load_runner(EngineSection(model=folder, num_blocks=8, num_threads=threads)).close()
    assert caplog.text.count("more_threads_than_cores") == warnings


@pytest.mark.parametrize(("least", "shares"), [(0, True), (1 << 40, False)])
def test_engines_share_cores_unless_their_model_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, shares: bool
) -> None:
    monkeypatch.setattr(worker_runner, "LEAST_SHARED_BYTES", least)
    folder = write_checkpoint(tmp_path)
    cores = shared_cores(EngineSection(cores_file=str(tmp_path / "cores")), folder)
    assert (cores is not None) is shares
    if cores is not None:
        cores.close()
    assert shared_cores(EngineSection(), folder) is None


@pytest.mark.parametrize("other", [{"kind": "vllm"}, {"device": "cuda"}])
def test_engines_with_threads_of_their_own_share_no_cores(other: dict[str, str]) -> None:
    section = EngineSection(cores_file="/cores", **other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"engine\.cores_file is for engine kvmesh on the CPU"):
        shared_cores(section, None)


def test_a_damaged_file_is_said_before_torch_is_loaded(tmp_path: Path) -> None:
    with (write_checkpoint(tmp_path) / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    argv = [sys.executable, "-X", "importtime", "-c", _LOAD, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "truncated, 1000 of" in done.stderr
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_adapters_are_refused_by_engines_that_have_none() -> None:
    for changes in ({"lora": "sql=folder"}, {"max_loras": 2}):
        with pytest.raises(ConfigError, match=r"engine\.kind vllm"):
            find_folder(EngineSection(model="m", **changes))
    with pytest.raises(ConfigError, match=r"engine\.max_loras .* got -1"):
        find_folder(EngineSection(kind="fake", max_loras=-1))


def test_several_ranks_are_refused_by_engines_of_one() -> None:
    for kind in ("kvmesh", "fake"):
        for name in ("tensor_parallel", "pipeline_parallel"):
            with pytest.raises(ConfigError, match=rf"{name} is 2.*set engine\.kind vllm"):
                find_folder(EngineSection(kind=kind, model="m", **{name: 2}))  # type: ignore[arg-type]
