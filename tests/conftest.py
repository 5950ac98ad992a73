"""What all tests share: how random hypothesis may be, and which tests stay in one process."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings

# Meshes that serve a whole run: who uses one is run where it is.
_SHARED_MESHES = ("torch_mesh", "fake_mesh")

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Says what runs in one process of several: mostly a file."""
    if not config.getoption("loadgroup", default=False):  # xdist's, in each of its processes
        return
    for item in items:
        group = _group(item)
        if group:
            item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item) -> str:
    """Name of the tests that share what is costly to start; none for those that share nothing."""
    asked: Sequence[str] = getattr(item, "fixturenames", ())
    for mesh in _SHARED_MESHES:
        if mesh in asked:
            return mesh
    if item.path.parent.name == "chaos":
        return ""  # each kills a mesh of its own
    return item.path.relative_to(item.config.rootpath).as_posix()
