"""The common part of both clients: arguments to messages, attempts, answers to deltas. No I/O.

Tests: tests/unit/client/test_calls.py, tests/integration/test_client.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypedDict, Unpack

import grpc

from kvmesh.client.connection import ClientTls, call_metadata
from kvmesh.client.failures import failure_of
from kvmesh.client.messages import Delta, GenerateOptions, Prompt, delta_of, request_message
from kvmesh.client.retry import Attempts, RetryPolicy
from kvmesh.core.clock import Clock, SystemClock
from kvmesh.core.errors import InvalidRequestError, KvMeshError, ProtocolError
from kvmesh.core.named_values import listed
from kvmesh.v1 import inference_service_pb2 as pb

Metadata = tuple[tuple[str, str], ...]


class ClientOptions(TypedDict, total=False):
    """Options of a client; each may be left out.

    Keys:
        tls: None is plain text.
        api_key: sent as a bearer token.
        default_model: for calls without a model; empty lets a gateway with one model choose.
        retry: for failed requests and cut streams; see `RetryPolicy`.
        metadata: sent with every call.
    """

    tls: ClientTls | None
    api_key: str | None
    default_model: str
    retry: RetryPolicy | None
    metadata: Mapping[str, str] | None


_KEYS = frozenset(ClientOptions.__annotations__)


class CallSettings:
    """The settings that all calls of one client share.

    Args:
        target: `host:port` of a gateway's gRPC port, or several, comma-separated.
        clock: measures the time left for a call.

    Raises:
        TypeError: an unknown option.
        InvalidRequestError: no address is given.
    """

    def __init__(
        self, target: str, *, clock: Clock | None = None, **options: Unpack[ClientOptions]
    ) -> None:
        unknown = set(options) - _KEYS
        if unknown:
            raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
        tls = options.get("tls")
        self.targets = listed(target)
        if not self.targets:
            raise InvalidRequestError("target is empty; give host:port of a gateway", "target")
        self.credentials = None if tls is None else tls.credentials()
        self.metadata: Metadata = call_metadata(options.get("api_key")) + tuple(
            (options.get("metadata") or {}).items()
        )
        self._default_model = options.get("default_model", "")
        self._retry = options.get("retry") or RetryPolicy()
        self._clock = SystemClock() if clock is None else clock
        self._rng = random.Random()
        self.first = self._rng.randrange(len(self.targets))

    def attempts(self, timeout_s: float | None) -> Attempts:
        """Makes the attempts of one call."""
        return Attempts(self._retry, timeout_s, self._clock, self._rng)

    def generation(self, prompt: Prompt, options: GenerateOptions) -> GenerationCall:
        """Makes one generation.

        Raises:
            InvalidRequestError: a prompt of another type, or a value that no message can hold.
            TypeError: an unknown option.
        """
        message = request_message(prompt, options, self._default_model)
        metadata = self.metadata + tuple(options.get("metadata", {}).items())
        return GenerationCall(message, metadata, self.attempts(options.get("timeout_s")))


class GenerationCall:
    """One generation over its attempts. Each attempt continues after the tokens already delivered.

    Attributes:
        is_complete: its last piece has arrived.
    """

    def __init__(self, message: pb.GenerateRequest, metadata: Metadata, attempts: Attempts) -> None:
        self.message = message
        self.metadata = metadata
        self._attempts = attempts
        self._point: pb.ResumePoint | None = None
        self._token_ids: list[int] = []
        self._delivered = False
        self.is_complete = False

    def begin(self) -> float | None:
        """Starts an attempt. Returns the seconds it may take; None is unlimited.

        Raises:
            DeadlineError: no time is left.
        """
        return self._attempts.begin()

    def take(self, response: pb.GenerateResponse) -> Delta:
        """Converts a piece that arrived."""
        delta = delta_of(response)
        if response.HasField("resume"):
            self._point = response.resume
        self._token_ids += delta.token_ids
        self._attempts.delivered()
        self._delivered, self.is_complete = True, delta.finish_reason is not None
        return delta

    def end(self) -> None:
        """Checks the end of the stream.

        Raises:
            ProtocolError: the generation had not finished.
        """
        if not self.is_complete:
            raise ProtocolError("no_finish_reason", "the stream ended before the generation did")

    def wait_after(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next attempt; raises the call's error if there is none."""
        failure = failure_from(error)
        if self._delivered:
            if self._point is None or not self._token_ids:  # an older gateway sends no resume point
                raise failure from error
            self.message.resume.CopyFrom(self._point)
            self.message.resume.token_ids.extend(self._token_ids)
        return self._attempts.wait_after(failure)


def failure_from(error: grpc.RpcError) -> KvMeshError:
    """The error of a failed call, from either of gRPC's two clients."""
    # Both kinds of errors describe the end of the call, under the same names.
    assert isinstance(error, (grpc.Call, grpc.aio.AioRpcError))
    return failure_of(error.code(), error.details(), tuple(error.trailing_metadata() or ()))
