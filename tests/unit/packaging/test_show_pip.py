"""What scripts/show_pip.sh makes of pip's output where nobody watches a terminal."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.unit.packaging.compose_file import ROOT

HAS_DEVICE = Path("/dev/nvidiactl").exists()


def shown(*lines: str) -> list[str]:
    done = subprocess.run(
        [ROOT / "scripts" / "show_pip.sh"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_each_stage_is_one_line() -> None:
    lines = shown(
        "Collecting grpcio (from kvmesh)",
        "  Downloading grpcio-1.whl (5 MB)",
        "Collecting torch (from kvmesh)",
        "Installing collected packages: grpcio, torch",
    )
    assert [line.split()[0] for line in lines] == ["looking", "installing"]
    assert lines[-1] == "installing 2 packages"


def test_cuda_without_a_device_is_said_once_with_the_way_out() -> None:
    lines = shown(
        "Collecting torch (from kvmesh)",
        "Collecting nvidia-cublas==13 (from torch)",
        "Collecting nvidia-cudnn-cu13==9 (from torch)",
    )
    warnings = [line for line in lines if "PIP_EXTRA_INDEX_URL" in line]
    assert len(warnings) == (0 if HAS_DEVICE else 1)
