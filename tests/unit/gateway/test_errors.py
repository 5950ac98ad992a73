from __future__ import annotations

import pytest

from kvmesh.core.errors import (
    AuthenticationError,
    DeadlineError,
    InvalidRequestError,
    KvMeshError,
    LostError,
    ModelNotFoundError,
    RefusedError,
)
from kvmesh.core.types import Refusal, RefusalReason
from services.gateway.errors import Stage, StageRefusedError, answer_for, plain_http_error


def refused(reason: RefusalReason, retry_after_ms: int = 0) -> Refusal:
    return Refusal(reason, "no", retry_after_ms=retry_after_ms)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("bad", "n", "invalid_value"), 400, "invalid_value"),
        (ModelNotFoundError("none", "model", "model_not_found"), 404, "model_not_found"),
        (AuthenticationError("who"), 401, "invalid_api_key"),
        (RefusedError(refused(RefusalReason.BUSY)), 503, "busy"),
        (StageRefusedError(refused(RefusalReason.QUOTA), Stage.GATEWAY), 429, "quota"),
        (LostError("gone"), 502, "LostError"),
        (DeadlineError("late"), 504, "DeadlineError"),
    ],
)
def test_status_and_code(error: KvMeshError, status: int, code: str) -> None:
    answer = answer_for(error)
    assert answer.status == status
    assert set(answer.body["error"]) == {"message", "type", "param", "code"}
    assert answer.body["error"]["code"] == code
    advice = "; try again in 1 s" if isinstance(error, RefusedError) else ""
    assert answer.body["error"]["message"] == f"{error}{advice}"


@pytest.mark.parametrize(("given_ms", "seconds"), [(0, "1"), (1000, "1"), (1001, "2")])
def test_retry_after_is_whole_seconds(given_ms: int, seconds: str) -> None:
    error = StageRefusedError(refused(RefusalReason.NO_SLOTS, given_ms), Stage.DECODE)
    headers = answer_for(error).headers
    assert headers == {"Retry-After": seconds, "x-kvmesh-refusal": "decode-no_slots"}


def test_errors_of_the_http_layer() -> None:
    answer = plain_http_error(413, "too long")
    assert answer.body["error"]["type"] == "invalid_request_error"
    assert plain_http_error(500, "x").body["error"]["type"] == "server_error"
