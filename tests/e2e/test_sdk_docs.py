"""Every example of docs/sdk.md, as a program of its own, against a real mesh."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys

import pytest

from kvmesh.core.config import child_environment
from tests.mesh_child import ROOT
from tests.mesh_processes import Mesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/sdk.md").read_text(), re.S | re.M)
DOCUMENTED, DOCUMENTED_HTTP = "127.0.0.1:8001", "http://127.0.0.1:8000"


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
async def test_an_example_runs(torch_mesh: Mesh, number: int) -> None:
    code: str = EXAMPLES[number]
    assert DOCUMENTED in code or DOCUMENTED_HTTP in code
    program = code.replace(DOCUMENTED, torch_mesh["gateway"].address)
    program = program.replace(DOCUMENTED_HTTP, torch_mesh.url)
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", program],
        env=child_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr
    await torch_mesh.idle()
