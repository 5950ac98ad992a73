"""The asyncio client. Tests: tests/integration/test_client.py."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack

import grpc

from kvmesh.client.connection import CHANNEL_OPTIONS, ClientTls, call_metadata
from kvmesh.client.failures import failure_of
from kvmesh.client.messages import (
    Delta,
    GenerateOptions,
    Generation,
    Model,
    Prompt,
    delta_of,
    generation_of,
    models_of,
    no_finish,
    request_message,
)
from kvmesh.client.retry import Attempts, RetryPolicy
from kvmesh.core.clock import SystemClock
from kvmesh.core.errors import KvMeshError
from kvmesh.v1 import inference_service_pb2 as pb
from kvmesh.v1.inference_service_pb2_grpc import InferenceServiceStub


class AsyncClient:
    """Generates text through a gateway; make it inside a running event loop.

    One client serves any number of concurrent calls. Calls fail with the errors of
    `kvmesh.core.errors`: `InvalidRequestError` (with `param`), `ModelNotFoundError`,
    `AuthenticationError`, `RefusedError` (with the refusal), `DeadlineError`, `LostError`.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: ClientTls | None = None,
        api_key: str | None = None,
        default_model: str = "",
        retry: RetryPolicy | None = None,
    ) -> None:
        """Opens no connection yet.

        Args:
            target: `host:port` of a gateway's gRPC port.
            tls: None is plain text.
            api_key: sent as a bearer token.
            default_model: for calls that name none; empty lets a gateway with one model choose.
            retry: for requests of which nothing was delivered; default three attempts.
        """
        if tls is None:
            self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            credentials = tls.credentials()
            self._channel = grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        self._stub = InferenceServiceStub(self._channel)
        self._metadata = call_metadata(api_key)
        self._default_model = default_model
        self._retry = RetryPolicy() if retry is None else retry
        self._rng = random.Random()

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Generates and returns the whole result; cancelling the task cancels on the server."""
        async with aclosing(self.stream(prompt, **options)) as deltas:
            return generation_of([delta async for delta in deltas])

    async def stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta, None]:
        """Generates and yields pieces as they come; the last one has the finish reason.

        Leaving the loop, `aclose()` or cancelling the task cancels on the server.
        """
        message = request_message(prompt, options, self._default_model)
        attempts = self._attempts(options.get("timeout_s"))
        delivered = False
        while True:
            call = self._stub.Generate(message, timeout=attempts.begin(), metadata=self._metadata)
            try:
                finished = False
                while (response := await call.read()) is not grpc.aio.EOF:
                    assert isinstance(response, pb.GenerateResponse)
                    delta = delta_of(response)
                    delivered, finished = True, delta.finish_reason is not None
                    yield delta
                if not finished:
                    raise no_finish()
                return
            except grpc.aio.AioRpcError as error:
                failure = _failure(error)
                if delivered:
                    raise failure from error
                wait_s = attempts.wait_after(failure)
            finally:
                call.cancel()
            await asyncio.sleep(wait_s)

    async def list_models(self, timeout_s: float | None = 10.0) -> list[Model]:
        """The models that are served, in order of name."""
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return models_of(
                    await self._stub.ListModels(
                        pb.ListModelsRequest(), timeout=attempts.begin(), metadata=self._metadata
                    )
                )
            except grpc.aio.AioRpcError as error:
                wait_s = attempts.wait_after(_failure(error))
            await asyncio.sleep(wait_s)

    async def close(self) -> None:
        """Ends running calls and closes the connection; may be called again."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, timeout_s, SystemClock(), self._rng)


def _failure(error: grpc.aio.AioRpcError) -> KvMeshError:
    return failure_of(error.code(), error.details(), tuple(error.trailing_metadata() or ()))
