"""A request's group is chosen at the gateway, by header, model name, tenant or default."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvmesh.policy.quota import TenantLimits
from services.gateway.config import ModelConfig, ScenarioConfig
from tests.integration.gateway_fake_worker import LAYOUT, MODEL
from tests.integration.gateway_stack import TWO_PAIRS, Stack, gateway_stack
from tests.integration.test_gateway_tenants import ask_with, write_tenants

SCENARIOS = {"p1": "chat", "d1": "chat", "p2": "doc", "d2": "doc"}
RULES = ScenarioConfig(of_models="quick=chat", of_tenants="acme=doc,lost=gone", default="chat")
HEADER = "x-kvmesh-scenario"


@asynccontextmanager
async def two_groups(folder: Path, **changes: Any) -> AsyncIterator[Stack]:
    """A gateway and groups chat and doc, of a prefill and a decode worker each."""
    async with gateway_stack(folder, TWO_PAIRS, **changes) as stack:
        for name, worker in stack.mesh.workers.items():
            worker.info = replace(worker.info, scenario=SCENARIOS[name])
        seen = stack.mesh.fleet_seen
        stack.mesh.changed.set()
        await stack.mesh.until(lambda: stack.mesh.fleet_seen > seen)
        frontend = stack.gateway.entrance.frontends[0]
        await stack.mesh.until(lambda: frontend.scenarios == {"chat", "doc"})
        yield stack
        await stack.idle()


async def test_each_request_finds_its_group_and_is_counted_there(tmp_path: Path) -> None:
    tenants = dict.fromkeys(("acme", "lost", "other"), TenantLimits())
    access = await write_tenants(tmp_path / "tenants.json", tenants)
    model = ModelConfig(path=str(tmp_path), served_name=MODEL, aliases="quick")
    changes: dict[str, Any] = {"access": access, "model": model, "scenario": RULES}
    async with two_groups(tmp_path, **changes) as stack:
        for tenant, model_name, header, scenario in (
            ("acme", MODEL, "", "doc"),
            ("acme", "quick", "", "chat"),
            ("acme", "quick", "doc", "doc"),
            ("acme", MODEL, "unknown", "doc"),
            ("lost", MODEL, "", "chat"),
            ("other", MODEL, "", "chat"),
        ):
            headers = {HEADER: header} if header else {}
            status, _, _ = await ask_with(stack, tenant, headers, model=model_name)
            assert status == 200
            assert stack.mesh.queries[-1].scenario == scenario, (tenant, model_name, header)
        await stack.idle()
        labels = {"model_name": MODEL, "checkpoint": LAYOUT.model_fingerprint[:8]}

        def counted(scenario: str) -> float:
            name, reason = "kvmesh_gateway_group_requests_total", "length"
            value = stack.gateway.metrics.value
            return value(name, **labels, scenario=scenario, finished_reason=reason)

        assert (counted("chat"), counted("doc")) == (3, 3)


async def test_limits_of_a_group_hold_where_request_and_tenant_name_none(tmp_path: Path) -> None:
    limits = {"acme": TenantLimits(tpot_ms=30), "other": TenantLimits()}
    access = await write_tenants(tmp_path / "tenants.json", limits)
    rules = replace(RULES, of_tenants="", ttft_ms="doc=20000", tpot_ms="doc=60,chat=50")
    async with two_groups(tmp_path, access=access, scenario=rules) as stack:
        for tenant, headers in (
            ("other", {HEADER: "doc"}),
            ("acme", {HEADER: "doc"}),
            ("acme", {HEADER: "doc", "x-slo-tpot-ms": "20", "x-slo-ttft-ms": "60000"}),
            ("other", {}),
        ):
            assert (await ask_with(stack, tenant, headers))[0] == 200
        told = [(query.tpot_s, query.ttft_budget_ms) for query in stack.mesh.queries]
        assert [tpot_s for tpot_s, _ in told] == [0.06, 0.03, 0.02, 0.05]
        assert all(budget_ms <= 20_000 for _, budget_ms in told[:2])
        assert 20_000 < told[2][1] <= 60_000


async def test_a_tenant_with_its_share_of_one_group_is_served_in_another(tmp_path: Path) -> None:
    limits = {"acme": TenantLimits(group_share=0.01), "other": TenantLimits(group_share=0.01)}
    access = await write_tenants(tmp_path / "tenants.json", limits)
    async with two_groups(tmp_path, access=access) as stack:
        stack.mesh.go.clear()  # decode workers wait
        running = asyncio.create_task(ask_with(stack, "acme", {HEADER: "doc"}))
        await stack.mesh.until(lambda: len(stack.mesh.queries) == 1)
        status, body, headers = await ask_with(stack, "acme", {HEADER: "doc"})
        assert (status, headers["x-kvmesh-quota"]) == (429, "group_share")
        assert "1 requests at once in this group" in body["error"]["message"]
        others = [
            asyncio.create_task(ask_with(stack, tenant, {HEADER: scenario}))
            for tenant, scenario in (("acme", "chat"), ("other", "doc"))
        ]
        await stack.mesh.until(lambda: len(stack.mesh.queries) == 3)
        stack.mesh.go.set()
        assert {(await each)[0] for each in (running, *others)} == {200}
        assert (await ask_with(stack, "acme", {HEADER: "doc"}))[0] == 200
        over = stack.gateway.metrics.value(
            "kvmesh_gateway_over_quota_total", tenant="acme", quota="group_share"
        )
        assert over == 1
