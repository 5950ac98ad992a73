from __future__ import annotations

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.core.launch import LaunchError, LaunchSpec
from kvmesh.core.types import Role
from services.launcher.deployments import deployment_of, read_deployments

TABLE = "a-prefill=prefill, a-decode=decode::,a-two=decode:chat:s3://models/two"


def test_the_table_names_workers_by_role_scenario_and_checkpoint() -> None:
    found = read_deployments(TABLE)
    assert found == {
        "a-prefill": LaunchSpec(Role.PREFILL),
        "a-decode": LaunchSpec(Role.DECODE),
        "a-two": LaunchSpec(Role.DECODE, "chat", "s3://models/two"),
    }
    assert [deployment_of(spec, found) for spec in found.values()] == list(found)


def test_workers_that_no_deployment_has_are_said_with_those_that_there_are() -> None:
    with pytest.raises(LaunchError, match=r"decode workers of scenario 'doc' .* a-prefill, a-dec"):
        deployment_of(LaunchSpec(Role.DECODE, "doc"), read_deployments(TABLE))


@pytest.mark.parametrize(
    "text",
    ["", " , ", "decode", "=decode", "a=reader", "a=", "a=decode,a=prefill", "a=decode,b=decode"],
)
def test_a_wrong_table_ends_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"kubernetes\.deployments"):
        read_deployments(text)
