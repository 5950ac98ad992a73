"""What a configuration makes of leases."""

from __future__ import annotations

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.runtime.kv_pool import LeaseLimits
from kvmesh.runtime.worker_config import FetchSection
from kvmesh.runtime.worker_pool import lease_limits


def test_options_become_limits() -> None:
    section = FetchSection(lease_s=4, max_leases=5, max_share=0.25)
    assert lease_limits(section) == LeaseLimits(4, 5, 0.25)


def test_more_than_all_blocks_cannot_be_leased() -> None:
    with pytest.raises(ConfigError, match=r"fetch\.max_share"):
        lease_limits(FetchSection(max_share=1.5))
