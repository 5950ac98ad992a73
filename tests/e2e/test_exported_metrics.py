"""A running mesh exports each series that dashboard and rules ask for, with the labels they use."""

from __future__ import annotations

import re

import aiohttp
import pytest

from tests.e2e.api_client import ApiClient, placed
from tests.mesh_child import Child
from tests.mesh_processes import Mesh
from tests.unit.deploy.promql import expressions, metrics_of, recorded

_TYPE = re.compile(r"^# TYPE (\S+) (\w+)$", re.MULTILINE)


async def exported_by(child: Child) -> set[str]:
    """Names of samples, also of series that have no sample yet."""
    url = f"http://{child.address_of('metrics_serving')}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        text = await response.text()
    names: set[str] = set()
    for name, kind in _TYPE.findall(text):
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {f"{name}{end}" for end in ends}
    return names


@pytest.mark.parametrize("where", ["rules.yml", "grafana/kvmesh.json"])
async def test_a_running_mesh_exports_them(
    fake_mesh: Mesh, fake_client: ApiClient, where: str
) -> None:
    for placement in ("disaggregated", "aggregated"):
        await fake_client.complete(list(range(9, 90)), max_tokens=3, headers=placed(placement))
    await fake_mesh.idle()
    exported: set[str] = set()
    for child in fake_mesh.children.values():
        exported |= await exported_by(child)
    asked = {name for each in expressions(where) for name in metrics_of(each)}
    assert asked - recorded() <= exported
