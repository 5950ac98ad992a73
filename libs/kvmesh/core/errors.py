"""The error tree. Each leaf knows its HTTP status, gRPC status and whether a retry is safe.

KvMeshError
├── ConfigError            the service cannot start as configured
├── InvalidRequestError    400 / INVALID_ARGUMENT, names the field
├── ModelNotFoundError     404 / NOT_FOUND
├── GoneError              410 / FAILED_PRECONDITION, a stream that cannot be resumed
├── StructureError         400 / INVALID_ARGUMENT, output cannot follow the requested structure
├── AuthenticationError    401 / UNAUTHENTICATED
├── RefusedError           429 or 503 / RESOURCE_EXHAUSTED or UNAVAILABLE, carries a Refusal
├── DeadlineError          504 / DEADLINE_EXCEEDED
├── LostError              502 / UNAVAILABLE, a failure of another service lost work
├── ProtocolError          a peer broke the wire contract
├── OutOfBlocksError       the block pool cannot serve an allocation
└── CheckpointError        a model folder cannot be loaded
"""

from __future__ import annotations

from typing import ClassVar

from kvmesh.core.types import Refusal, RefusalReason


class KvMeshError(Exception):
    """Base class of all KVMesh errors."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    retry_safe: ClassVar[bool] = False


class ConfigError(KvMeshError):
    """The service cannot start as configured; the message says what to change."""


class InvalidRequestError(KvMeshError):
    """The caller's request is wrong.

    Attributes:
        param: the field, as the caller wrote it; None if the request as a whole is wrong.
    """

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFoundError(InvalidRequestError):
    """The model is not served here."""

    http_status = 404
    grpc_status = "NOT_FOUND"


class GoneError(InvalidRequestError):
    """A stream's journal does not exist, or does not belong to the caller."""

    http_status = 410
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="stream_gone")


class StructureError(InvalidRequestError):
    """Output cannot follow the requested structure; the message says why."""


class AuthenticationError(KvMeshError):
    """The caller's key is missing or unknown."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class RefusedError(KvMeshError):
    """A service refused; the refusal is passed on to the client."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    retry_safe = True

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal

    @property
    def status(self) -> int:
        """429 when the caller's own quota is the cause, else 503."""
        return 429 if self.refusal.reason is RefusalReason.QUOTA else 503


class DeadlineError(KvMeshError):
    """The deadline passed after work had begun."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class LostError(KvMeshError):
    """A failure of another service lost work."""

    http_status = 502
    grpc_status = "UNAVAILABLE"
    retry_safe = True


class ProtocolError(KvMeshError):
    """A peer broke the wire contract; the channel is cut.

    Attributes:
        reason: short machine-readable name.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class OutOfBlocksError(KvMeshError):
    """The block pool cannot serve an allocation."""

    grpc_status = "RESOURCE_EXHAUSTED"
    retry_safe = True


class CheckpointError(KvMeshError):
    """A model folder cannot be loaded; the message says what is missing or unsupported."""
