"""Chooses the scenario of a request, and so the P/D group that serves it.

Source: P/D-Serve 3.2. Tests: tests/unit/gateway/request/test_scenarios.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvmesh.core.named_values import named_numbers, named_values
from kvmesh.policy.quota import Tenant
from services.gateway.config import ScenarioConfig

TimesMs = tuple[int, int, int]


def _limits(config: ScenarioConfig, name: str) -> dict[str, int]:
    form = "SCENARIO=MS with numbers above 0"
    return named_numbers(getattr(config, name), f"scenario.{name}", form)


@dataclass(frozen=True, slots=True)
class Scenarios:
    """Rules by which requests find their scenario.

    Attributes:
        of_models: scenario by model name, alias or adapter.
        of_tenants: scenario by name of a tenant in the tenant directory.
        default: scenario of requests for which no rule names an existing group; empty: the group
            of no scenario.
        times_ms: by scenario, the limits in milliseconds of requests that name none: wait for
            workers, mean time per token, time between two tokens; 0 takes the gateway's.
    """

    of_models: Mapping[str, str] = field(default_factory=dict)
    of_tenants: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    times_ms: Mapping[str, TimesMs] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ScenarioConfig) -> Scenarios:
        """Reads the rules of a config.

        Raises:
            ConfigError: a list is malformed.
        """
        ttft, tpot, itl = (_limits(config, name) for name in ("ttft_ms", "tpot_ms", "itl_ms"))
        return cls(
            named_values(config.of_models, "scenario.of_models", "MODEL=SCENARIO"),
            named_values(config.of_tenants, "scenario.of_tenants", "TENANT=SCENARIO"),
            config.default,
            {
                each: (ttft.get(each, 0), tpot.get(each, 0), itl.get(each, 0))
                for each in {*ttft, *tpot, *itl}
            },
        )

    def choose(self, named: str, model: str, tenant: Tenant, groups: Collection[str]) -> str:
        """Returns the scenario of a request: the first that has a group, else the default.

        Args:
            named: the scenario that the request itself names; empty for none. It comes first.
            model: the model name, alias or adapter that the request names. It comes second.
            tenant: the caller's tenant. It comes third, if the tenant directory lists it.
            groups: scenarios of the existing groups; while it is empty, any scenario is accepted.
        """
        of_tenant = self.of_tenants.get(tenant.name, "") if tenant.is_known else ""
        for scenario in (named, self.of_models.get(model, ""), of_tenant):
            if scenario and (not groups or scenario in groups):
                return scenario
        return self.default or named
