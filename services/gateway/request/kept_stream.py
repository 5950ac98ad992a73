"""A stream in the journal: its bytes, and its comparison with the client's position.

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
"""Layout of a record's head: choice, position, number of tokens that follow."""
_CACHED = 0x8000
"""Flag in a record's choice: its position is the number of cached prompt tokens instead."""
RESUMED = _RECORD.pack(0, 0, 0)
"""Record that says that the stream was resumed: the only one without tokens."""


@dataclass(slots=True)
class Kept:
    """A stream as the journal holds it.

    Attributes:
        token_ids: tokens of each choice.
        cached_tokens: cached prompt tokens of each choice, as in its usage.
        is_resumed: it was resumed before from here.
    """

    head: Head
    token_ids: list[list[int]]
    cached_tokens: list[int]
    is_resumed: bool = False


def owner_of(ticket: Ticket | None) -> str:
    """Returns the owner of a stream: its tenant, with the namespace."""
    tenant = Tenant() if ticket is None else ticket.tenant
    return f"{tenant.namespace}{tenant.name}"


def record_bytes(choice: int, first: int, token_ids: Sequence[int]) -> bytes:
    """Returns the record of a choice's tokens from position `first`."""
    return _RECORD.pack(choice, first, len(token_ids)) + array("I", token_ids).tobytes()


def cached_bytes(choice: int, num_tokens: int) -> bytes:
    """Returns the record of a choice's number of cached prompt tokens."""
    return _RECORD.pack(_CACHED | choice, num_tokens, 0)


def kept_of(parts: Sequence[bytes]) -> Kept:
    """Reads a stream: its head, then records, any number in each part.

    Tokens that were written twice count once.

    Raises:
        ValueError, LookupError, TypeError: the bytes are not a stream.
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
            elif not count:
                kept.is_resumed = True
            elif begin > len(part):
                raise ValueError("a record is too short")
            else:
                kept.token_ids[choice][first : first + count] = array("I", part[end:begin])
    return kept


def kept_by_client(given: GivenId, owner: str, caller: Caller, body: bytes) -> Kept:
    """Rebuilds a stream that the journal does not hold from its event id and the repeated request.

    Raises:
        GoneError: the stream belongs to another caller.
        InvalidRequestError: the request differs from the stream's.
    """
    count = len(given.places)
    where = (caller.scenario, caller.placement.value)
    head = head_of_start(given.start, owner, body, count, *where)
    return Kept(head, [[] for _ in range(count)], [0] * count)


def delivered_of(given: GivenId, kept: Kept) -> Delivered:
    """Returns the delivered part of a stream, from the client's event id and the journal.

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
    head = kept.head
    # A start comes from the client, who may have made it up. Whoever resumes from one place again
    # and again has the prompt computed each time.
    is_paid = not given.start and not kept.is_resumed
    return Delivered(head.seed, head.prompt_sum, is_paid, head.checkpoints, tuple(choices))
