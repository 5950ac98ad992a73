"""What KV groups say of themselves; how they share blocks is in tests/property/test_groups.py."""

from __future__ import annotations

import pytest

from kvmesh.core.kv_groups import KvGroups


@pytest.mark.parametrize(
    ("groups", "is_plain"),
    [
        (KvGroups(), True),
        (KvGroups((40,)), True),
        (KvGroups((0, 40)), False),
        (KvGroups((0,), state_blocks=1), False),
    ],
)
def test_blocks_hold_all_layers_only_where_there_is_one_group(
    groups: KvGroups, is_plain: bool
) -> None:
    assert groups.is_plain == is_plain
