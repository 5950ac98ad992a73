from __future__ import annotations

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.policy.quota import Tenant
from services.gateway.config import ScenarioConfig
from services.gateway.request.scenarios import Scenarios

RULES = Scenarios.of(ScenarioConfig("fast=chat, deep=gone", "acme=doc,cut=gone", "rest"))
GROUPS = frozenset({"chat", "doc", "rest", "code", ""})
ACME, CUT = (Tenant(name, is_known=True) for name in ("acme", "cut"))


@pytest.mark.parametrize(
    ("named", "model", "tenant", "scenario"),
    [
        ("code", "fast", ACME, "code"),
        ("", "fast", ACME, "chat"),
        ("", "m", ACME, "doc"),
        ("", "m", Tenant(), "rest"),
        # What has no group is passed over.
        ("made up", "fast", ACME, "chat"),
        ("made up", "deep", ACME, "doc"),
        ("made up", "deep", CUT, "rest"),
        # Nobody becomes a tenant by a key that happens to have its name.
        ("", "m", Tenant("acme"), "rest"),
    ],
)
def test_the_first_that_names_a_group_wins(
    named: str, model: str, tenant: Tenant, scenario: str
) -> None:
    assert RULES.choose(named, model, tenant, GROUPS) == scenario


def test_before_workers_are_known_all_names_count() -> None:
    assert RULES.choose("soon", "fast", ACME, frozenset()) == "soon"
    assert RULES.choose("", "deep", ACME, frozenset()) == "gone"


def test_without_rules_a_request_keeps_its_own() -> None:
    assert Scenarios().choose("made up", "m", ACME, GROUPS) == "made up"
    assert Scenarios().choose("", "m", ACME, GROUPS) == ""


def test_a_malformed_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scenario\.of_tenants is TENANT=SCENARIO"):
        Scenarios.of(ScenarioConfig(of_tenants="acme"))


def test_limits_of_a_scenario_are_read_by_kind() -> None:
    rules = Scenarios.of(
        ScenarioConfig(ttft_ms="chat=500, doc=8000", tpot_ms="chat=50", itl_ms="code=90")
    )
    assert rules.times_ms == {"chat": (500, 50, 0), "doc": (8000, 0, 0), "code": (0, 0, 90)}


@pytest.mark.parametrize("limit", ["0", "-5", "fast", "1.5"])
def test_a_limit_that_is_no_number_above_0_is_refused(limit: str) -> None:
    with pytest.raises(ConfigError, match=rf"scenario\.tpot_ms is SCENARIO=MS .* got chat={limit}"):
        Scenarios.of(ScenarioConfig(tpot_ms=f"chat={limit}"))
