from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvmesh.core.control_groups import memory_left

_GIB = 1 << 30


def _group(version: int, limit: str, used: int, droppable: int) -> dict[str, str]:
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    limit_name, used_name, droppable_name = names[version]
    stat = f"anon 5\n{droppable_name} {droppable}\nactive_file 9\n"
    return {limit_name: f"{limit}\n", used_name: f"{used}\n", "memory.stat": stat}


@pytest.mark.parametrize(
    ("membership", "groups", "left"),
    [
        # Version 2, in a container: its own group is the root that it sees.
        ("0::/\n", {"": _group(2, str(4 * _GIB), _GIB, 1000)}, 3 * _GIB + 1000),
        # The tightest of a group and those above it.
        (
            "0::/pods/one\n",
            {
                "pods": _group(2, str(4 * _GIB), 3 * _GIB, 0),
                "pods/one": _group(2, str(2 * _GIB), 0, 0),
            },
            _GIB,
        ),
        ("0::/pods\n", {"pods": _group(2, "max", _GIB, 0)}, math.inf),
        # Version 1, whose unlimited group has a number.
        ("4:memory:/box\n0::/\n", {"memory/box": _group(1, str(_GIB), 1000, 0)}, _GIB - 1000),
        ("4:memory:/\n", {"memory": _group(1, str((1 << 63) - 4096), 0, 0)}, (1 << 63) - 4096),
        # Linux may be about to drop pages.
        ("0::/\n", {"": _group(2, str(_GIB), _GIB + 5, 0)}, 0),
        ("5:cpu:/box\n", {"memory/box": _group(1, str(_GIB), 0, 0)}, math.inf),
        ("0::/\n", {"": {"memory.max": "what\n"}}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_memory_of_control_groups(
    tmp_path: Path, membership: str, groups: dict[str, dict[str, str]], left: float
) -> None:
    root, own = tmp_path / "groups", tmp_path / "own"
    own.write_text(membership)
    for folder, files in groups.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (root / folder / name).write_text(text)
    assert memory_left(root, own) == left


def test_where_there_are_no_control_groups(tmp_path: Path) -> None:
    assert memory_left(tmp_path, tmp_path / "none") == math.inf


def test_this_process_has_memory_left() -> None:
    assert memory_left() > 1 << 20
