"""Which services may call: by the name in the certificate that mTLS has verified.

One CA makes all services of a mesh; this keeps a stolen key from being good at every port.
Tests: tests/integration/test_tls.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

_HEALTH = "/grpc.health.v1.Health/"

_MAKERS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_BEHAVIOURS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


class KnownCallers(grpc.aio.ServerInterceptor):
    """Turns away who has a certificate of the CA, but not one of these names.

    Health stays open to every certificate of the CA: orchestrators and people ask for it.

    Args:
        names: common names.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or str(handler_call_details.method).startswith(_HEALTH):
            return handler  # type: ignore[no-any-return]
        kind = (handler.request_streaming, handler.response_streaming)
        behaviour = getattr(handler, _BEHAVIOURS[kind])
        checked = self._stream(behaviour) if handler.response_streaming else self._unary(behaviour)
        return _MAKERS[kind](
            checked,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _check(self, context: Any) -> None:
        shown = {name.decode() for name in context.auth_context().get("x509_common_name", ())}
        if not shown & self._names:
            text = f"{', '.join(sorted(shown)) or 'nobody'} may not call this service"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)

    def _unary(self, behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Any]:
        async def call(request: Any, context: Any) -> Any:
            await self._check(context)
            return await behaviour(request, context)

        return call

    def _stream(
        self, behaviour: Callable[[Any, Any], AsyncIterator[Any]]
    ) -> Callable[[Any, Any], Any]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(context)
            async for response in behaviour(request, context):
                yield response

        return call
