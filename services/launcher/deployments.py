"""The table of Deployments: what the workers of each one are started as.

Tests: tests/unit/launcher/test_deployments.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvmesh.core.errors import ConfigError
from kvmesh.core.launch import LaunchError, LaunchSpec
from kvmesh.core.named_values import listed
from kvmesh.core.types import Role

_OPTION = "kubernetes.deployments"


def read_deployments(text: str) -> dict[str, LaunchSpec]:
    """Reads `kubernetes.deployments`.

    Returns:
        the specification of each Deployment's workers, by the Deployment's name. No two are equal.

    Raises:
        ConfigError: the text is empty or wrong.
    """
    found: dict[str, LaunchSpec] = {}
    for entry in listed(text):
        name, equals, rest = entry.partition("=")
        role, scenario, checkpoint = [*rest.split(":", 2), "", ""][:3]
        roles = {each.value: each for each in Role}
        if not (name and equals and role in roles):
            known = ", ".join(roles)
            raise ConfigError(
                f"{_OPTION} {entry!r}: write NAME=ROLE[:SCENARIO[:CHECKPOINT]], ROLE one of {known}"
            )
        spec = LaunchSpec(roles[role], scenario, checkpoint)
        if name in found or spec in found.values():
            raise ConfigError(f"{_OPTION} {entry!r}: another entry has this name or these workers")
        found[name] = spec
    if not found:
        raise ConfigError(f"{_OPTION} is empty: name the Deployments of workers")
    return found


def deployment_of(spec: LaunchSpec, deployments: Mapping[str, LaunchSpec]) -> str:
    """Returns the name of the Deployment whose workers are as specified.

    Raises:
        LaunchError: there is none.
    """
    for name, made in deployments.items():
        if made == spec:
            return name
    wanted = f"{spec.role.value} workers of scenario {spec.scenario!r}"
    raise LaunchError(
        f"no Deployment has {wanted} with checkpoint {spec.checkpoint!r}: add one to the chart's"
        " launcher.groups; those that there are: " + ", ".join(deployments)
    )
