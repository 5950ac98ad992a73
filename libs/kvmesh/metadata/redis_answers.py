"""Reading what Redis answers: what makes no sense is a store that failed, not an error of ours.

Something else may listen at its address, or somebody else may write under its keys.
Tests: tests/integration/test_redis_hostile.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvmesh.metadata.store import StoreUnavailableError


@contextlib.contextmanager
def understanding() -> Iterator[None]:
    """Around the reading of an answer.

    Raises:
        StoreUnavailableError: it has another form than its script gives.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise StoreUnavailableError(f"Redis gave a senseless answer: {error!r}") from error


def bytes_of(answer: Any) -> bytes:
    """A string.

    Raises:
        StoreUnavailableError: it is none.
    """
    if not isinstance(answer, bytes):
        raise StoreUnavailableError(f"Redis answered with {type(answer).__name__}, not a string")
    return answer


def strings_of(answer: Any) -> list[bytes]:
    """A list of strings.

    Raises:
        StoreUnavailableError: it is none.
    """
    if not isinstance(answer, list):
        raise StoreUnavailableError(f"Redis answered with {type(answer).__name__}, not a list")
    return [bytes_of(each) for each in answer]
