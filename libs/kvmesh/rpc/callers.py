"""Which services may call: by the name in the certificate that mTLS has verified.

One CA makes all services of a mesh; this keeps a stolen key from being good at every port.
Tests: tests/integration/test_tls.py.
"""

from __future__ import annotations

from typing import Any

import grpc

from kvmesh.rpc.handlers import Continuation, checked

_HEALTH = "/grpc.health.v1.Health/"


class KnownCallers(grpc.aio.ServerInterceptor):
    """Turns away who has a certificate of the CA, but not one of these names.

    Health stays open to every certificate of the CA: orchestrators and people ask for it.

    Args:
        names: common names.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or str(handler_call_details.method).startswith(_HEALTH):
            return handler
        return checked(handler, self._check, handler.request_deserializer)

    async def _check(self, request: Any, context: Any) -> None:
        shown = {name.decode() for name in context.auth_context().get("x509_common_name", ())}
        if not shown & self._names:
            text = f"{', '.join(sorted(shown)) or 'nobody'} may not call this service"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
