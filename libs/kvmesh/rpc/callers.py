"""Restricts the callers of a service by the name in the certificate that mTLS has verified.

One CA signs all services of a mesh. With this check, a stolen key does not open every port.
Tests: tests/integration/test_tls.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import grpc

from kvmesh.core.errors import ConfigError
from kvmesh.rpc.handlers import Continuation, checked

_HEALTH = "/grpc.health.v1.Health/"


class RpcNames:
    """Takes a server's place when servicers are added, and notes their rpcs.

    Attributes:
        names: names of the rpcs, without their service.
        services: full names of the services.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.services: set[str] = set()

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Called first by gRPC's generated code; the names come with the other call."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        """Notes a service and its rpcs."""
        self.services.add(service)
        self.names.update(handlers)


class RunningServer:
    """Takes the place of a server that runs when servicers are added to it."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Adds the handlers that gRPC looks up by name."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        """Leaves out gRPC's shortcut, which a running server does not take."""


def check_callers(names: Collection[str], rpcs: Collection[str]) -> None:
    """Checks that no rule names an rpc that does not exist.

    Args:
        names: as for `KnownCallers`.
        rpcs: names of the service's rpcs.

    Raises:
        ConfigError: names the bad entry, and the existing rpcs.
    """
    for entry in sorted(names):
        name, colon, rpc = entry.partition(":")
        if not name or (colon and rpc not in rpcs):
            known = ", ".join(sorted(rpcs))
            raise ConfigError(
                f"server.callers: {entry!r} is no name, or names no rpc of this service: {known}"
            )


class KnownCallers(grpc.aio.ServerInterceptor):
    """Refuses callers whose certificate is from the CA but has none of the given names.

    Health stays open to every certificate of the CA, since orchestrators and people ask for it.

    Args:
        names: common names. A name alone allows all rpcs; with a colon and an rpc, as in
            `prefill:RegisterWorker`, it allows that rpc.
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
        # A colon in a certificate's name must not give it the right of another name.
        return ":" not in name and not self._names.isdisjoint({name, f"{name}:{rpc}"})
