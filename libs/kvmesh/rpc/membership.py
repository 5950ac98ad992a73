"""Proof of membership on gRPC: callers prove that they hold the mesh's secret.

Each call carries a time and an HMAC of its method and that time as metadata. The secret is not
sent. So a process that takes over a dead service's port learns nothing that it could use for
another method, or after `MAX_AGE_S`. A call's messages are neither encrypted nor signed: across
networks that others can read, use mTLS as well. docs/adr/0020-mesh-secret.md says why.
Tests: tests/integration/test_membership.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

import grpc

from kvmesh.core.mesh_secret import MeshSecret
from kvmesh.rpc.handlers import Continuation, checked

PROOF_KEY = "kvmesh-proof"
"""Metadata of a call: Unix seconds and the HMAC in hex, separated by a point."""

MAX_AGE_S = 300
"""Seconds before and after its time that a proof is valid, so that clocks may differ a bit."""

_PURPOSE = "grpc call"
_HEALTH = "grpc.health.v1.Health"
"""The health service stays open: orchestrators call it without a secret."""

WallClock = Callable[[], float]
"""Unix seconds."""


class MembersOnly(grpc.aio.ServerInterceptor):
    """Refuses callers that do not prove that they hold the mesh's secret.

    Args:
        secret: the mesh's secret.
        public: full names of the services that everybody may call.
        clock: this host's clock.
    """

    def __init__(
        self, secret: MeshSecret, public: Collection[str] = (), clock: WallClock = time.time
    ) -> None:
        self._secret = secret
        self._public = public
        self._clock = clock

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        service = method[1:].partition("/")[0]
        if handler is None or service == _HEALTH or service in self._public:
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        problem = self._problem(method, metadata.get(PROOF_KEY))
        # A member gets the handler itself, so its messages have no extra cost.
        return handler if not problem else _refusing(handler, problem)

    def _problem(self, method: str, shown: str | bytes | None) -> str:
        """The reason why a caller may not call; empty if it may."""
        if shown is None:
            return (
                "this service is closed to callers without its mesh's secret: set "
                "server.secret_file of the caller, or --secret-file of a command"
            )
        text = shown.decode(errors="replace") if isinstance(shown, bytes) else shown
        seconds, _, mac = text.partition(".")
        try:
            proof, told = bytes.fromhex(mac), int(seconds)
        except ValueError:
            return f"{PROOF_KEY} is malformed"
        if not self._secret.accepts(proof, _PURPOSE, _content(method, told)):
            return (
                "the caller has another secret than this mesh; compare server.secret_file of both"
            )
        off_s = round(self._clock() - told)
        if abs(off_s) > MAX_AGE_S:
            return (
                f"the caller's clock differs by {abs(off_s)} s, at most {MAX_AGE_S} s are allowed: "
                "set both clocks"
            )
        return ""


def _content(method: str, seconds: int) -> bytes:
    return f"{method} {seconds}".encode()


def _refusing(
    handler: grpc.RpcMethodHandler[Any, Any], problem: str
) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)

    # The request is not parsed: it comes from a stranger.
    return checked(handler, refuse, None)


def call_proof(secret: MeshSecret, method: str, now_s: float) -> tuple[str, str]:
    """The metadata with which a member calls a method.

    Args:
        method: path such as `/kvmesh.v1.SchedulerService/Route`.
        now_s: Unix time.
    """
    seconds = int(now_s)
    return PROOF_KEY, f"{seconds}.{secret.proof(_PURPOSE, _content(method, seconds)).hex()}"


class MemberChannel(grpc.aio.Channel):
    """A channel whose calls carry the proof.

    gRPC's own interceptors would need a task for each call and another object around each stream,
    and call credentials need TLS.

    Args:
        inner: makes the calls.
        secret: the mesh's secret.
        clock: this host's clock.
    """

    def __init__(
        self, inner: grpc.aio.Channel, secret: MeshSecret, clock: WallClock = time.time
    ) -> None:
        self._inner = inner
        self._secret = secret
        self._clock = clock

    def _proving(self, make: Callable[..., Any], method: str, *rest: Any, **options: Any) -> Any:
        call = make(method, *rest, **options)

        def prove(*arguments: Any, metadata: Any = None, **more: Any) -> Any:
            proof = call_proof(self._secret, method, self._clock())
            return call(*arguments, metadata=(*(metadata or ()), proof), **more)

        return prove

    def unary_unary(self, method: str, *rest: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._proving(self._inner.unary_unary, method, *rest, **options)

    def unary_stream(self, method: str, *rest: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._proving(self._inner.unary_stream, method, *rest, **options)

    def stream_unary(self, method: str, *rest: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._proving(self._inner.stream_unary, method, *rest, **options)

    def stream_stream(self, method: str, *rest: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._proving(self._inner.stream_stream, method, *rest, **options)

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._inner.channel_ready()

    async def __aenter__(self) -> MemberChannel:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, traceback)
