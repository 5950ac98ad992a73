"""Which services may call: by the name in the certificate that mTLS has verified.

One CA makes all services of a mesh; this keeps a stolen key from being good at every port.
Tests: tests/integration/test_tls.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import grpc

from kvmesh.core.errors import ConfigError
from kvmesh.rpc.handlers import Continuation, checked

_HEALTH = "/grpc.health.v1.Health/"


class RpcNames:
    """Stands where a server does, and notes the rpcs of servicers that are added to it.

    Attributes:
        names: without their service.
        services: full names of the services.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.services: set[str] = set()

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """What gRPC's generated code calls first; the names come with the other call."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        """Notes a service and its rpcs."""
        self.services.add(service)
        self.names.update(handlers)


def check_callers(names: Collection[str], rpcs: Collection[str]) -> None:
    """Says no to a caller that is given an rpc which is not there: it would be let in nowhere.

    Args:
        names: as of `KnownCallers`.
        rpcs: of the service.

    Raises:
        ConfigError: names the entry, and the rpcs that there are.
    """
    for entry in sorted(names):
        name, colon, rpc = entry.partition(":")
        if not name or (colon and rpc not in rpcs):
            known = ", ".join(sorted(rpcs))
            raise ConfigError(
                f"server.callers: {entry!r} is no name, or names no rpc of this service: {known}"
            )


class KnownCallers(grpc.aio.ServerInterceptor):
    """Turns away who has a certificate of the CA, but not one of these names.

    Health stays open to every certificate of the CA: orchestrators and people ask for it.

    Args:
        names: common names, each for all rpcs, or with a colon and the one rpc that it may call, as
            `prefill:RegisterWorker`.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        path = str(handler_call_details.method)
        if handler is None or path.startswith(_HEALTH):
            return handler
        rpc = path.rpartition("/")[2]

        async def check(_request: Any, context: Any) -> None:
            shown = {name.decode() for name in context.auth_context().get("x509_common_name", ())}
            if any(self._may(name, rpc) for name in shown):
                return
            text = f"{', '.join(sorted(shown)) or 'nobody'} may not call {rpc} of this service"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)

        return checked(handler, check, handler.request_deserializer)

    def _may(self, name: str, rpc: str) -> bool:
        # A colon in the certificate's name must not make it another one's right.
        return ":" not in name and not self._names.isdisjoint({name, f"{name}:{rpc}"})
