"""Parses Redis's answers; a malformed answer counts as a failed store.

Another program may listen at its address, or another client may write its keys.
Tests: tests/integration/test_redis_hostile.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvmesh.metadata.store import StoreUnavailableError


@contextlib.contextmanager
def understanding() -> Iterator[None]:
    """Context in which an answer is parsed.

    Raises:
        StoreUnavailableError: the answer has not the form that its script returns.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise StoreUnavailableError(f"Redis sent an invalid answer: {error!r}") from error


def bytes_of(answer: Any) -> bytes:
    """Returns an answer that must be a string.

    Raises:
        StoreUnavailableError: it is no string.
    """
    if not isinstance(answer, bytes):
        raise StoreUnavailableError(f"Redis answered with {type(answer).__name__}, not a string")
    return answer


def strings_of(answer: Any) -> list[bytes]:
    """Returns an answer that must be a list of strings.

    Raises:
        StoreUnavailableError: it is no list of strings.
    """
    if not isinstance(answer, list):
        raise StoreUnavailableError(f"Redis answered with {type(answer).__name__}, not a list")
    return [bytes_of(each) for each in answer]
