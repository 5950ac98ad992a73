from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.api_client import ApiClient
from tests.mesh_processes import Mesh, running_mesh

STEP = {"engine.fake-step-s": 0.01}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """Two prefill and two decode workers with the fake engine, to be killed; 10 ms a step."""
    async with running_mesh(tmp_path, flags={"prefill": STEP, "decode": STEP}) as mesh:
        yield mesh


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Mesh]:
    """One prefill and one decode worker."""
    async with running_mesh(tmp_path, 1, 1, flags={"prefill": STEP, "decode": STEP}) as mesh:
        yield mesh


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[ApiClient]:
    async with ApiClient(mesh.url) as client:
        yield client
