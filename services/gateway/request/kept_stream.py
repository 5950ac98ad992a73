"""A stream as the journal keeps it: written as bytes, read by another gateway, and set against what
the stream's client says it has.

Pure. Tests: tests/unit/gateway/request/test_journal.py, tests/integration/test_gateway_resume.py.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.errors import GoneError
from kvmesh.policy.quota import Tenant
from services.gateway.request.choice import Behind, Caller, Delivered
from services.gateway.request.event_ids import GivenId
from services.gateway.request.stream_head import Head, head_of, head_of_start
from services.gateway.tenants.admission import Ticket

_RECORD = struct.Struct("<HII")
"""A choice, a position, and how many tokens follow."""
_CACHED = 0x8000
"""Set in a record's choice: in place of a position it has the number of cached prompt tokens."""


@dataclass(slots=True)
class Kept:
    """A stream as the journal has it.

    Attributes:
        token_ids: of each choice.
        cached_tokens: of each choice's prompt, as its usage tells.
    """

    head: Head
    token_ids: list[list[int]]
    cached_tokens: list[int]


def owner_of(ticket: Ticket | None) -> str:
    """Whose a stream is."""
    tenant = Tenant() if ticket is None else ticket.tenant
    return f"{tenant.namespace}{tenant.name}"


def record_bytes(choice: int, first: int, token_ids: Sequence[int]) -> bytes:
    """Tokens of a choice, the first of them at a position."""
    return _RECORD.pack(choice, first, len(token_ids)) + array("I", token_ids).tobytes()


def cached_bytes(choice: int, num_tokens: int) -> bytes:
    """So many tokens of a choice's prompt were cached."""
    return _RECORD.pack(_CACHED | choice, num_tokens, 0)


def kept_of(parts: Sequence[bytes]) -> Kept:
    """A stream from what was written: its head, then records, some in each part.

    What was written twice counts once.

    Raises:
        ValueError, LookupError, TypeError: that is no stream.
    """
    head = head_of(parts[0])
    kept = Kept(head, [[] for _ in range(head.num_choices)], [0] * head.num_choices)
    for part in parts[1:]:
        begin = 0
        while begin < len(part):
            end = begin + _RECORD.size
            if end > len(part):
                raise ValueError("a record is too short")
            choice, first, count = _RECORD.unpack_from(part, begin)
            begin = end + 4 * count
            if choice & _CACHED:
                kept.cached_tokens[choice ^ _CACHED] = first
            elif begin > len(part):
                raise ValueError("a record is too short")
            else:
                kept.token_ids[choice][first : first + count] = array("I", part[end:begin])
    return kept


def kept_by_client(given: GivenId, owner: str, caller: Caller, body: bytes) -> Kept:
    """A stream of which the journal holds nothing yet, from an id that is whole and the request.

    Raises:
        GoneError: it is another caller's.
        InvalidRequestError: it was another request.
    """
    count = len(given.places)
    where = (caller.scenario, caller.placement.value)
    head = head_of_start(given.start, owner, body, count, *where)
    return Kept(head, [[] for _ in range(count)], [0] * count)


def delivered_of(given: GivenId, kept: Kept) -> Delivered:
    """What a client has, by what it says and what the journal holds.

    Raises:
        GoneError: the journal holds less than the client says.
    """
    if len(given.places) != kept.head.num_choices:
        raise GoneError("Last-Event-ID: another stream has this key")
    choices: list[Behind | None] = []
    for choice, place in enumerate(given.places):
        token_ids = kept.token_ids[choice]
        if len(token_ids) < place.num_kept:
            raise GoneError("Last-Event-ID: the stream's tokens are not kept")
        so_far = (*token_ids[: place.num_kept], *place.tail)
        cached = kept.cached_tokens[choice] if place.cached is None else place.cached
        behind = Behind(so_far, cached, place.is_complete)
        choices.append(behind if place.is_opened else None)
    head, is_paid = kept.head, not given.start  # a client may say so
    return Delivered(head.seed, head.prompt_sum, is_paid, head.checkpoints, tuple(choices))
