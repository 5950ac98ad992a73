"""Authenticates and admits a call, and counts its usage at its end.

Tests: tests/integration/test_gateway_tenants.py.
"""

from __future__ import annotations

from services.gateway.errors import QuotaError, StageRefusedError
from services.gateway.metrics import GatewayMetrics
from services.gateway.tenants.access import KeyRing
from services.gateway.tenants.admission import Admission, Ticket


class Admitted:
    """Context manager of one admitted call; see `Entrance.admit`."""

    __slots__ = ("_admission", "_authorization", "_keys", "_metrics", "_ticket")

    def __init__(
        self, keys: KeyRing, admission: Admission, metrics: GatewayMetrics, authorization: str
    ) -> None:
        self._keys = keys
        self._admission = admission
        self._metrics = metrics
        self._authorization = authorization
        self._ticket: Ticket | None = None

    async def __aenter__(self) -> Ticket:
        try:
            tenant = self._keys.check(self._authorization)
            self._ticket = await self._admission.enter(tenant)
        except StageRefusedError as error:
            self._metrics.refused(error.refusal.reason.value, error.stage.value)
            if isinstance(error, QuotaError):
                self._metrics.over_quota(tenant, error.quota)
            raise
        return self._ticket

    async def __aexit__(self, *_error: object) -> None:
        assert self._ticket is not None, "entered"
        self._metrics.used(self._ticket)
        self._admission.leave(self._ticket)
