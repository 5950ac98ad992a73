"""Requests that are no messages of their type: INVALID_ARGUMENT, without a traceback in the log.

grpc answers UNKNOWN by itself and logs an error for each. Unary requests are caught here, those of
streams in `stream.incoming`. Tests: tests/integration/test_grpc_fuzz.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError


class _Damaged:
    """Stands for a request that could not be read."""

    def __init__(self, error: DecodeError) -> None:
        self.message = f"the request cannot be read: {error}"


class DamagedRequests(grpc.aio.ServerInterceptor):
    """Turns damaged unary requests away before the service sees them."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler  # type: ignore[no-any-return]
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        behaviour = (
            _refusing_stream(handler.unary_stream)
            if handler.response_streaming
            else _refusing(handler.unary_unary)
        )
        return make(
            behaviour,
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _tolerant(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(raw: bytes) -> Any:
        try:
            return deserializer(raw)
        except DecodeError as error:
            return _Damaged(error)

    return read


def _refusing(behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Any]:
    async def call(request: Any, context: Any) -> Any:
        if isinstance(request, _Damaged):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.message)
        return await behaviour(request, context)

    return call


def _refusing_stream(
    behaviour: Callable[[Any, Any], AsyncIterator[Any]],
) -> Callable[[Any, Any], Any]:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, _Damaged):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.message)
        async for response in behaviour(request, context):
            yield response

    return call
