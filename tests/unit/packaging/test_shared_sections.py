from __future__ import annotations

from collections import defaultdict

import pytest

from kvmesh.core.config import load_config, options_of
from kvmesh.core.errors import ConfigError
from kvmesh.core.shared_sections import SHARED_OPTIONS
from tests.unit.packaging.compose_file import CONFIGS


def test_all_options_of_sections_that_differ_between_services_are_listed() -> None:
    sections = defaultdict(set)
    for config in CONFIGS.values():
        own = defaultdict(set)
        for leaf in options_of(config):
            own[leaf.env.rpartition("__")[0]].add(leaf.env)
        for section, names in own.items():
            sections[section].add(frozenset(names))
    differing = [names for variants in sections.values() if len(variants) > 1 for names in variants]
    assert frozenset().union(*differing) == SHARED_OPTIONS


@pytest.mark.parametrize("service", CONFIGS)
def test_one_environment_for_all_services(service: str) -> None:
    environ = {"KVMESH_LIMITS__STALL_S": "3", "KVMESH_REDIS__TIMEOUT_S": "2"}
    config = load_config(CONFIGS[service], environ=environ)
    if service == "gateway":
        assert config.limits.stall_s == 3
    if service == "kvmanager":
        assert config.redis.timeout_s == 2


@pytest.mark.parametrize(
    ("service", "name", "value"),
    [
        ("gateway", "KVMESH_LIMITS__STALL_S", "0"),
        ("gateway", "KVMESH_HTTP__MAX_CONNECTIONS", "-1"),
        ("scheduler", "KVMESH_FLEET__REPORT_INTERVAL_S", "0"),
        ("scheduler", "KVMESH_PLANNING__REALLOCATE_S", "0"),
        ("scheduler", "KVMESH_ROUTING__AGGREGATE_TOKENS", "-1"),
        ("kvmanager", "KVMESH_POOL__WINDOW_S", "0"),
        ("kvmanager", "KVMESH_POOL__BUDGET_MB_S", "-1"),
        ("prefill", "KVMESH_DATA__WINDOW_MB", "0"),
        ("prefill", "KVMESH_WORKER__HANDOFF_S", "0"),
        ("decode", "KVMESH_ENGINE__BLOCK_SIZE", "0"),
        ("decode", "KVMESH_FETCH__MAX_QUERIES", "-1"),
    ],
)
def test_numbers_that_nothing_works_with_end_the_start(service: str, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: \S+ must be "):
        load_config(CONFIGS[service], environ={name: value})


def test_an_option_of_no_service_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="STALLS"):
        load_config(CONFIGS["gateway"], environ={"KVMESH_LIMITS__STALLS": "3"})
