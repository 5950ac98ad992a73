"""The blocking client. Tests: tests/integration/test_client.py."""

from __future__ import annotations

import random
import time
from collections.abc import Generator
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


class Client:
    """Generates text through a gateway; one client may be used by many threads.

    Calls fail with the errors of `kvmesh.core.errors`, as those of `AsyncClient` do.
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
        """Opens no connection yet; see `AsyncClient` for the arguments."""
        if tls is None:
            self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            credentials = tls.credentials()
            self._channel = grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        self._stub = InferenceServiceStub(self._channel)
        self._metadata = call_metadata(api_key)
        self._default_model = default_model
        self._retry = RetryPolicy() if retry is None else retry
        self._rng = random.Random()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Generates and returns the whole result."""
        return generation_of(self.stream(prompt, **options))

    def stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generator[Delta, None, None]:
        """Generates and yields pieces as they come; the last one has the finish reason.

        Leaving the loop or `close()` cancels on the server. Use one stream in one thread.
        """
        message = request_message(prompt, options, self._default_model)
        attempts = self._attempts(options.get("timeout_s"))
        delivered = False
        while True:
            call = self._stub.Generate(message, timeout=attempts.begin(), metadata=self._metadata)
            try:
                finished = False
                for response in call:
                    delta = delta_of(response)
                    delivered, finished = True, delta.finish_reason is not None
                    yield delta
                if not finished:
                    raise no_finish()
                return
            except grpc.RpcError as error:
                failure = _failure(error)
                if delivered:
                    raise failure from error
                wait_s = attempts.wait_after(failure)
            finally:
                call.cancel()
            time.sleep(wait_s)

    def list_models(self, timeout_s: float | None = 10.0) -> list[Model]:
        """The models that are served, in order of name."""
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return models_of(
                    self._stub.ListModels(
                        pb.ListModelsRequest(), timeout=attempts.begin(), metadata=self._metadata
                    )
                )
            except grpc.RpcError as error:
                wait_s = attempts.wait_after(_failure(error))
            time.sleep(wait_s)

    def close(self) -> None:
        """Ends running calls and closes the connection; may be called again."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, timeout_s, SystemClock(), self._rng)


def _failure(error: grpc.RpcError) -> KvMeshError:
    assert isinstance(error, grpc.Call)  # every error of a call is also that call
    return failure_of(error.code(), error.details(), tuple(error.trailing_metadata() or ()))
