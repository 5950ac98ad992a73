"""Handlers of rpcs behind a check that sees each call first: what interceptors are made of.

Tests: tests/integration/test_tls.py, tests/integration/test_grpc_fuzz.py.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

Check = Callable[[Any, Any], Awaitable[None]]
"""Takes the request (or the stream of them) and the context, and aborts calls that end there."""

Continuation = Callable[
    [grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any] | None]"
]
"""What an interceptor gets: the handler of a call, None of unknown methods."""

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
    """The handler behind a check.

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

    # Streams that are written by `context.write`, as those of gRPC's own health service, are
    # coroutines like single answers.
    yields = handler.response_streaming and not inspect.iscoroutinefunction(behaviour)
    return make(
        stream if yields else answer,
        request_deserializer=deserializer,
        response_serializer=handler.response_serializer,
    )
