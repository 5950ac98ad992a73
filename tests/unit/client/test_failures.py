from __future__ import annotations

import grpc
import pytest

from kvmesh.client.failures import failure_of
from kvmesh.core.errors import (
    AuthenticationError,
    DeadlineError,
    InvalidRequestError,
    KvMeshError,
    LostError,
    ModelNotFoundError,
    RefusedError,
)
from kvmesh.core.types import RefusalReason

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "word", "kind"),
    [
        (Code.INVALID_ARGUMENT, None, InvalidRequestError),
        (Code.NOT_FOUND, None, ModelNotFoundError),
        (Code.UNAUTHENTICATED, None, AuthenticationError),
        (Code.PERMISSION_DENIED, None, AuthenticationError),
        (Code.DEADLINE_EXCEEDED, None, DeadlineError),
        (Code.DEADLINE_EXCEEDED, "deadline", RefusedError),
        (Code.UNAVAILABLE, None, LostError),
        (Code.UNAVAILABLE, "lost", LostError),
        (Code.UNAVAILABLE, "busy", RefusedError),
        (Code.CANCELLED, None, LostError),
        (Code.RESOURCE_EXHAUSTED, None, RefusedError),
        (Code.INTERNAL, None, KvMeshError),
    ],
)
def test_kinds(code: grpc.StatusCode, word: str | None, kind: type[KvMeshError]) -> None:
    trailing = () if word is None else (("kvmesh-refusal", word),)
    assert type(failure_of(code, "why", trailing)) is kind


@pytest.mark.parametrize("reason", [r for r in RefusalReason if r is not RefusalReason.LOST])
def test_a_refusal_keeps_its_reason_and_its_hint(reason: RefusalReason) -> None:
    trailing = [("kvmesh-refusal", reason.value), ("retry-after-ms", "250")]
    error = failure_of(Code.UNAVAILABLE, "no room", trailing)
    assert isinstance(error, RefusedError)
    assert error.refusal.reason is reason
    assert error.refusal.retry_after_ms == 250
    assert str(error) == "no room"


@pytest.mark.parametrize(
    ("code", "reason"),
    [(Code.RESOURCE_EXHAUSTED, RefusalReason.QUOTA), (Code.UNAVAILABLE, RefusalReason.BUSY)],
)
def test_a_reason_of_a_newer_gateway(code: grpc.StatusCode, reason: RefusalReason) -> None:
    error = failure_of(code, "", [("kvmesh-refusal", "moon_phase"), ("retry-after-ms", "soon")])
    assert isinstance(error, RefusedError)
    assert error.refusal.reason is reason
    assert error.refusal.retry_after_ms == 0


def test_an_invalid_request_names_its_field() -> None:
    error = failure_of(Code.INVALID_ARGUMENT, "too hot", [("kvmesh-param", "temperature")])
    assert isinstance(error, InvalidRequestError)
    assert error.param == "temperature"


def test_binary_and_missing_metadata_are_no_problem() -> None:
    assert isinstance(failure_of(Code.UNAVAILABLE, None, [("x-bin", b"\0")]), LostError)
    assert str(failure_of(Code.UNAVAILABLE, None, None)) == "UNAVAILABLE"
