"""Client SDK of the gRPC API: `Client` for threads, `AsyncClient` for asyncio.

    with Client("localhost:9000") as client:
        print(client.generate("def fib(n):", max_tokens=32).text)

Needs grpcio and protobuf only. Tests: tests/unit/client, tests/integration/test_client.py.
"""

from kvmesh.client.aio import AsyncClient
from kvmesh.client.calls import ClientOptions
from kvmesh.client.connection import ClientTls
from kvmesh.client.messages import Delta, GenerateOptions, Generation, Model, PlacedAt, Prompt
from kvmesh.client.retry import NO_RETRY, RetryPolicy
from kvmesh.client.sync import Client
from kvmesh.client.tools import Message, Tool, ToolCall, ToolCallDelta
from kvmesh.core.types import Structure, StructureKind

__all__ = [
    "NO_RETRY",
    "AsyncClient",
    "Client",
    "ClientOptions",
    "ClientTls",
    "Delta",
    "GenerateOptions",
    "Generation",
    "Message",
    "Model",
    "PlacedAt",
    "Prompt",
    "RetryPolicy",
    "Structure",
    "StructureKind",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
]
