"""gRPC server reflection, with which tools such as grpcurl call a service without its protos.

Tests: tests/integration/test_reflection.py, tests/integration/test_grpc_fuzz.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from functools import cached_property
from typing import Any

import grpc
from grpc_reflection.v1alpha.reflection_pb2 import (
    DESCRIPTOR,
    ServerReflectionRequest,
    ServerReflectionResponse,
)

from kvmesh.core.errors import ProtocolError
from kvmesh.rpc.stream import incoming

SERVICE_NAME: str = DESCRIPTOR.services_by_name["ServerReflection"].full_name


class ReflectionServicer:
    """gRPC's own reflection service, which answers a damaged question with INVALID_ARGUMENT.

    Args:
        service_names: full names of the services that it lists.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._service_names = tuple(service_names)

    @cached_property
    def _answers(self) -> Any:
        # Imported late: the descriptors take 2 MiB, and few processes are ever asked.
        from grpc_reflection.v1alpha import reflection  # noqa: PLC0415

        # Its stub declares a coroutine, but the method is an async generator.
        return reflection.aio.ReflectionServicer(self._service_names)

    async def ServerReflectionInfo(
        self, questions: AsyncIterator[ServerReflectionRequest], context: Any
    ) -> AsyncIterator[ServerReflectionResponse]:
        """See grpc_reflection."""
        try:
            async for answer in self._answers.ServerReflectionInfo(incoming(questions), context):
                yield answer
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
