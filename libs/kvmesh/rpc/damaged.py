"""Answers requests that cannot be parsed with INVALID_ARGUMENT, without a traceback in the log.

grpc itself answers UNKNOWN and logs an error for each. This module handles unary requests;
`stream.incoming` handles those of streams. Tests: tests/integration/test_grpc_fuzz.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvmesh.rpc.handlers import Continuation, checked


class _Damaged:
    """Replaces a request that could not be parsed."""

    def __init__(self, error: DecodeError) -> None:
        self.message = f"the request cannot be read: {error}"


class DamagedRequests(grpc.aio.ServerInterceptor):
    """Refuses damaged unary requests before the service sees them."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        return checked(handler, _check, _tolerant(handler.request_deserializer))


def _tolerant(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(raw: bytes) -> Any:
        try:
            return deserializer(raw)
        except DecodeError as error:
            return _Damaged(error)

    return read


async def _check(request: Any, context: Any) -> None:
    if isinstance(request, _Damaged):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.message)
