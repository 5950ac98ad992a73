"""The asyncio client. Tests: tests/integration/test_client.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack

import grpc

from kvmesh.client.calls import CallSettings, ClientOptions, failure_from
from kvmesh.client.connection import CHANNEL_OPTIONS, Gateways
from kvmesh.client.messages import (
    Delta,
    GenerateOptions,
    Generation,
    Model,
    Prompt,
    generation_of,
    models_of,
)
from kvmesh.v1 import inference_service_pb2 as pb
from kvmesh.v1.inference_service_pb2_grpc import InferenceServiceStub


class AsyncClient:
    """Generates text through a gateway; create it inside a running event loop.

    One client serves any number of concurrent calls. Calls fail with the errors of
    `kvmesh.core.errors`: `InvalidRequestError` (with `param`), `ModelNotFoundError`,
    `AuthenticationError`, `RefusedError` (with the refusal), `DeadlineError`, `LostError`.
    """

    def __init__(self, target: str, **options: Unpack[ClientOptions]) -> None:
        """Creates the client without connecting.

        Args:
            target: `host:port` of a gateway's gRPC port, or several, comma-separated: calls go to
                one of them, and to the next one when it fails.
            options: see `ClientOptions`.

        Raises:
            TypeError: an unknown option.
            InvalidRequestError: no address is given.
        """
        self._calls = CallSettings(target, **options)
        credentials = self._calls.credentials
        if credentials is None:
            channels = [
                grpc.aio.insecure_channel(each, options=CHANNEL_OPTIONS)
                for each in self._calls.targets
            ]
        else:
            channels = [
                grpc.aio.secure_channel(each, credentials, options=CHANNEL_OPTIONS)
                for each in self._calls.targets
            ]
        self._channels = channels
        stubs = [InferenceServiceStub(channel) for channel in channels]
        self._gateways = Gateways(stubs, self._calls.first)

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Generates and returns the whole result; cancelling the task cancels on the server."""
        async with aclosing(self.stream(prompt, **options)) as deltas:
            return generation_of([delta async for delta in deltas])

    async def stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta, None]:
        """Generates and yields pieces as they arrive; the last one has the finish reason.

        Leaving the loop, `aclose()` or cancelling the task cancels on the server.
        """
        run = self._calls.generation(prompt, options)
        while True:
            stub = self._gateways.stub
            call = stub.Generate(run.message, timeout=run.begin(), metadata=run.metadata)
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
                    assert isinstance(response, pb.GenerateResponse)
                    yield run.take(response)
                run.end()
                return
            except grpc.aio.AioRpcError as error:
                if run.is_complete:
                    return  # only the status after the last piece is lost
                wait_s = run.wait_after(error)
                self._gateways.leave(stub)
            finally:
                call.cancel()
            await asyncio.sleep(wait_s)

    async def list_models(self, timeout_s: float | None = 10.0) -> list[Model]:
        """The models that the gateway serves, in order of name."""
        attempts = self._calls.attempts(timeout_s)
        request, metadata = pb.ListModelsRequest(), self._calls.metadata
        while True:
            stub = self._gateways.stub
            try:
                timeout = attempts.begin()
                return models_of(await stub.ListModels(request, timeout=timeout, metadata=metadata))
            except grpc.aio.AioRpcError as error:
                wait_s = attempts.wait_after(failure_from(error))
                self._gateways.leave(stub)
            await asyncio.sleep(wait_s)

    async def close(self) -> None:
        """Ends running calls and closes the connection; may be called again."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
