"""What a configuration makes of leases and fetches."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.runtime.fetch_result import FetchOptions
from kvmesh.runtime.kv_pool import LeaseLimits
from kvmesh.runtime.worker_config import FetchSection
from kvmesh.runtime.worker_pool import fetch_options, lease_limits


def test_options_become_limits() -> None:
    section = FetchSection(timeout_s=3, lease_s=4, max_leases=5, max_share=0.25)
    assert lease_limits(section) == LeaseLimits(4, 5, 0.25)
    assert fetch_options(section) == FetchOptions(3)


@pytest.mark.parametrize(
    ("make", "section", "name"),
    [
        (lease_limits, FetchSection(lease_s=0), "lease_s"),
        (lease_limits, FetchSection(max_leases=-1), "max_leases"),
        (lease_limits, FetchSection(max_share=1.5), "max_share"),
        (fetch_options, FetchSection(timeout_s=0), "timeout_s"),
        (fetch_options, FetchSection(stall_s=0), "stall_s"),
    ],
)
def test_what_cannot_be_is_refused(
    make: Callable[[FetchSection], object], section: FetchSection, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"fetch.{name}"):
        make(section)
