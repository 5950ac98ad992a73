"""Converts errors to answers for clients: HTTP status, OpenAI body, headers.

Pure. Tests: tests/unit/gateway/test_errors.py.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from kvmesh.core.errors import AuthenticationError, InvalidRequestError, KvMeshError, RefusedError
from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.policy.quota import Quota, QuotaRefusal

REFUSAL_HEADER = "x-kvmesh-refusal"
QUOTA_HEADER = "x-kvmesh-quota"


class Stage(enum.Enum):
    """The part of the system that refused."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    DECODE = "decode"
    PREFILL = "prefill"


class StageRefusedError(RefusedError):
    """A refusal, with the part of the system that refused."""

    def __init__(self, refusal: Refusal, stage: Stage) -> None:
        super().__init__(refusal)
        self.stage = stage

    @property
    def label(self) -> str:
        """`<stage>-<reason>`, the value of the refusal header."""
        return f"{self.stage.value}-{self.refusal.reason.value}"


_QUOTA_WORDS = {
    Quota.REQUESTS: "requests per minute",
    Quota.TOKENS: "tokens per minute",
    Quota.CONCURRENCY: "requests at once",
    Quota.GROUP: "requests at once in this group, its share",
}


class QuotaError(StageRefusedError):
    """A quota of the caller's tenant is used up.

    Attributes:
        quota: the quota that is used up.
        used_up: the limit and when to try again.
    """

    def __init__(self, refusal: QuotaRefusal) -> None:
        message = f"this key's tenant may have {refusal.limit} {_QUOTA_WORDS[refusal.quota]}"
        retry_after_ms = max(1, math.ceil(refusal.retry_after_s * 1000))
        super().__init__(
            Refusal(RefusalReason.QUOTA, message, retry_after_ms=retry_after_ms), Stage.GATEWAY
        )
        self.quota = refusal.quota
        self.used_up = refusal


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as an HTTP answer."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error body."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(answer: ErrorAnswer, request_id: str) -> dict[str, Any]:
    """Anthropic's error body for an answer with OpenAI's."""
    other = _INVALID if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    kind = _ANTHROPIC_TYPES.get(answer.status, other)
    error = {"type": kind, "message": answer.body["error"]["message"]}
    return {"type": "error", "error": error, "request_id": request_id}


def answer_for(error: KvMeshError) -> ErrorAnswer:
    """The answer to a request that failed with `error`."""
    if isinstance(error, InvalidRequestError):
        kind = "not_found_error" if error.http_status == HTTPStatus.NOT_FOUND else _INVALID
        body = error_body(str(error), kind, param=error.param, code=error.code)
        return ErrorAnswer(error.http_status, body)
    if isinstance(error, AuthenticationError):
        body = error_body(str(error), "authentication_error", code="invalid_api_key")
        return ErrorAnswer(error.http_status, body, {"WWW-Authenticate": "Bearer"})
    if isinstance(error, RefusedError):
        return _refused(error)
    body = error_body(str(error), "server_error", code=type(error).__name__)
    return ErrorAnswer(error.http_status, body)


_INVALID = "invalid_request_error"


def _refused(error: RefusedError) -> ErrorAnswer:
    refusal = error.refusal
    status = error.status
    kind = "rate_limit_error" if status == HTTPStatus.TOO_MANY_REQUESTS else "overloaded_error"
    label = error.label if isinstance(error, StageRefusedError) else refusal.reason.value
    headers = {"Retry-After": str(retry_after_s(refusal)), REFUSAL_HEADER: label}
    if isinstance(error, QuotaError):
        headers[QUOTA_HEADER] = error.quota.value
    body = error_body(message_for(error), kind, code=refusal.reason.value)
    return ErrorAnswer(status, body, headers)


def message_for(error: KvMeshError) -> str:
    """The error's text. For a refusal, it includes when to retry."""
    if not isinstance(error, RefusedError):
        return str(error)
    return f"{error.refusal.message}; try again in {retry_after_s(error.refusal)} s"


def retry_after_s(refusal: Refusal) -> int:
    """Whole seconds for the Retry-After header, at least one."""
    return max(1, math.ceil(refusal.retry_after_ms / 1000))


def plain_http_error(status: int, message: str) -> ErrorAnswer:
    """An error of the HTTP layer (404, 405, 413, …)."""
    kind = _INVALID if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return ErrorAnswer(status, error_body(message, kind, code=code))
