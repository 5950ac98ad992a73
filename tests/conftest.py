"""What all tests share: how long and how random hypothesis may be."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A busy machine is slow, not wrong. With CI set, the examples are the same in every run, so that
# a change is judged by itself; anywhere else they are new each time and find what is left.
settings.register_profile(
    "kvmesh",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
settings.load_profile("kvmesh")
