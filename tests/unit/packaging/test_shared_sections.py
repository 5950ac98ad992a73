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


def test_an_option_of_no_service_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="STALLS"):
        load_config(CONFIGS["gateway"], environ={"KVMESH_LIMITS__STALLS": "3"})
