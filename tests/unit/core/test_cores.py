from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from kvmesh.core.cores import cpu_quota, quota_of, usable_cores, whole_cores


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("150000 100000\n", 1.5),
        ("400000 100000", 4.0),
        ("25000 50000", 0.5),
        ("max 100000\n", math.inf),
        ("-1\n 100000\n", math.inf),
    ],
)
def test_quotas_in_cores(text: str, cores: float) -> None:
    assert quota_of(text) == cores


@pytest.mark.parametrize(
    ("seen", "quota", "cores"),
    [(8, math.inf, 8), (8, 1.5, 1), (8, 0.25, 1), (8, 4.0, 4), (2, 3.5, 2)],
)
def test_a_part_of_a_core_is_none(seen: int, quota: float, cores: int) -> None:
    assert whole_cores(seen, quota) == cores


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        # Version 2, in a container: its own group is the root that it sees.
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        # The tightest of a group and those above it.
        (
            "0::/pods/one\n",
            {"pods/cpu.max": "200000 100000\n", "pods/one/cpu.max": "300000 100000\n"},
            2.0,
        ),
        # A path of the host's that the container does not see.
        ("0::/../docker/abc\n", {"cpu.max": "max 100000\n"}, math.inf),
        # Version 1.
        (
            "5:memory:/box\n4:cpu,cpuacct:/box\n0::/\n",
            {"cpu/box/cpu.cfs_quota_us": "250000\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        (
            "1:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            math.inf,
        ),
        # Cpusets are in the affinity.
        ("3:cpuset:/box\n", {"cpu/box/cpu.cfs_quota_us": "100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "what\n"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_quotas_of_control_groups(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float
) -> None:
    groups = _write(tmp_path / "groups", files)
    own = _write(tmp_path, {"own": membership}) / "own"
    assert cpu_quota(groups, own) == quota


def test_where_there_are_no_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "none") == math.inf


@pytest.mark.skipif(sys.platform != "linux", reason="affinities are Linux's")
def test_cores_that_are_not_this_processes_do_not_count() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
