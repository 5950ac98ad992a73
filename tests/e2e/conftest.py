from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.api_client import ApiClient
from tests.mesh_processes import Mesh, running_mesh


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def torch_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """Two prefill and two decode workers with the real engine and the embedded model."""
    folder = tmp_path_factory.mktemp("torch_mesh")
    async with running_mesh(folder, engine="kvmesh", is_forked=False) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fake_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """Two prefill and two decode workers with the fake engine; 10 ms a step."""
    step = {"engine.fake-step-s": 0.01}
    flags = {"prefill": step, "decode": step}
    folder = tmp_path_factory.mktemp("fake_mesh")
    async with running_mesh(folder, flags=flags, is_forked=False) as mesh:
        yield mesh


@pytest.fixture
async def torch_client(torch_mesh: Mesh) -> AsyncIterator[ApiClient]:
    async with ApiClient(torch_mesh.url) as client:
        yield client


@pytest.fixture
async def fake_client(fake_mesh: Mesh) -> AsyncIterator[ApiClient]:
    async with ApiClient(fake_mesh.url) as client:
        yield client
