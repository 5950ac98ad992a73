"""Puts a check in front of an rpc's handler; interceptors are built from it.

Tests: tests/integration/test_tls.py, tests/integration/test_grpc_fuzz.py.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

Check = Callable[[Any, Any], Awaitable[None]]
"""Takes the request (or the stream of them) and the context; aborts a call that is not allowed."""

Continuation = Callable[
    [grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any] | None]"
]
"""An interceptor's argument: returns the handler of a call, or None for an unknown method."""

_KINDS: dict[tuple[bool, bool], tuple[str, Callable[..., grpc.RpcMethodHandler[Any, Any]]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def checked(
    handler: grpc.RpcMethodHandler[Any, Any],
    check: Check,
    deserializer: Callable[[bytes], Any] | None,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler that runs the check before each call.

    Args:
        handler: of any kind of rpc.
        deserializer: of requests; may differ from the handler's own.
    """
    name, make = _KINDS[handler.request_streaming, handler.response_streaming]
    behaviour = getattr(handler, name)

    async def answer(request: Any, context: Any) -> Any:
        await check(request, context)
        return await behaviour(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(request, context)
        async for response in behaviour(request, context):
            yield response

    # Handlers that write a stream with `context.write`, as gRPC's own health service does, are
    # coroutines like those of single answers.
    yields = handler.response_streaming and not inspect.iscoroutinefunction(behaviour)
    return make(
        stream if yields else answer,
        request_deserializer=deserializer,
        response_serializer=handler.response_serializer,
    )
