"""Converts gRPC failures to KVMesh errors; pure.

The gateway ends a failed call with a status and trailing metadata: `kvmesh-refusal` (the reason
word of a refusal), `retry-after-ms` and `kvmesh-param` (the wrong field).
Tests: tests/unit/client/test_failures.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import grpc

from kvmesh.core.errors import (
    AuthenticationError,
    DeadlineError,
    GoneError,
    InvalidRequestError,
    KvMeshError,
    LostError,
    ModelNotFoundError,
    RefusedError,
)
from kvmesh.core.types import Refusal, RefusalReason

REFUSAL_KEY = "kvmesh-refusal"
RETRY_AFTER_KEY = "retry-after-ms"
PARAM_KEY = "kvmesh-param"

_REASONS = {reason.value: reason for reason in RefusalReason}
_LOST = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED}
_MEANS: Mapping[grpc.StatusCode, Callable[[str], KvMeshError]] = {
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.FAILED_PRECONDITION: GoneError,
}


def failure_of(
    code: grpc.StatusCode, details: str | None, trailing: Iterable[tuple[str, str | bytes]] | None
) -> KvMeshError:
    """The error for a failed call.

    Args:
        code: the call's status.
        details: the status message.
        trailing: trailing metadata; a connection that broke has none.
    """
    metadata = {key: value for key, value in trailing or () if isinstance(value, str)}
    message = details or code.name
    word = metadata.get(REFUSAL_KEY)
    if code is grpc.StatusCode.NOT_FOUND:
        return ModelNotFoundError(message, metadata.get(PARAM_KEY, "model"))
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(message, metadata.get(PARAM_KEY), word)
    if code in _MEANS:
        return _MEANS[code](message)
    if word == RefusalReason.LOST.value:
        return LostError(message)
    if word is not None or code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return RefusedError(_refusal(code, word, message, metadata.get(RETRY_AFTER_KEY, "")))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(message)
    if code in _LOST:
        return LostError(message)
    return KvMeshError(f"{code.name}: {message}")


def _refusal(code: grpc.StatusCode, word: str | None, message: str, retry_after: str) -> Refusal:
    # An unknown reason, of a newer gateway: the status still tells whose limit it was.
    quota = code is grpc.StatusCode.RESOURCE_EXHAUSTED
    unknown = RefusalReason.QUOTA if quota else RefusalReason.BUSY
    return Refusal(
        reason=_REASONS.get(word or "", unknown),
        message=message,
        retry_after_ms=int(retry_after) if retry_after.isdecimal() else 0,
    )
