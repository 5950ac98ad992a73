"""The head of a stream: everything besides its tokens that another gateway needs to resume it.

The journal holds the whole head. While the journal may not hold it yet, event ids carry the start:
the part of the head that a client cannot supply by sending its request again.
Pure. Tests: tests/unit/gateway/request/test_stream_head.py.
"""

from __future__ import annotations

import binascii
import json
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass, fields
from zlib import crc32

from kvmesh.core.errors import GoneError, InvalidRequestError
from kvmesh.core.values import quick
from services.gateway.request.event_ids import HEADER


@quick
@dataclass(frozen=True, slots=True)
class Head:
    """A stream's request, and the values that were fixed when it arrived.

    Attributes:
        kind: the API of the request.
        owner: tenant that may resume the stream.
        created: seconds since the epoch, as in its events.
        seed: the call's sampling seed.
        prompt_sum: CRC-32 of the prompts' token ids; it differs if the model or a date in the chat
            template does.
        checkpoints: for each generation, the checkpoint and adapter that serve it; see `made_by`.
        body: the request's body as the client sent it.
    """

    kind: str
    owner: str
    request_id: str
    created: int
    seed: int
    prompt_sum: int
    checkpoints: tuple[str, ...]
    scenario: str
    placement: str
    body: bytes

    @property
    def num_choices(self) -> int:
        """Number of generations."""
        return len(self.checkpoints)


_FIELDS = tuple(field.name for field in fields(Head) if field.name != "body")
_START = struct.Struct("<QQIII")
"""Layout of a start: seed, seconds, and checksums of prompt, owner and body.

NUL-separated words follow.
"""
_SECONDS = 1 << 40


def head_bytes(head: Head) -> bytes:
    """Writes a head for the journal; the body stays as it is."""
    found = {name: getattr(head, name) for name in _FIELDS}
    return json.dumps(found).encode() + b"\n" + head.body


def head_of(raw: bytes) -> Head:
    """Reads a head that `head_bytes` wrote.

    Raises:
        ValueError, LookupError, TypeError: that is no head.
    """
    found, _, body = raw.partition(b"\n")
    told = json.loads(found)
    return Head(**{**told, "checkpoints": tuple(told["checkpoints"])}, body=body)


def start_text(head: Head) -> str:
    """Writes the start of a head for event ids.

    It has only checksums of the owner and the body, which the client sends again.
    """
    checkpoints = head.checkpoints
    told = checkpoints[:1] if len(set(checkpoints)) == 1 else checkpoints
    sums = (head.prompt_sum, crc32(head.owner.encode()), crc32(head.body))
    words = "\0".join((head.kind, head.request_id, *told))
    start = _START.pack(head.seed, head.created, *sums) + words.encode()
    return urlsafe_b64encode(start).decode().rstrip("=")


def head_of_start(
    text: str, owner: str, body: bytes, num_choices: int, scenario: str, placement: str
) -> Head:
    """Restores the head of a stream whose client sends its request again.

    The client could forge the start, so no value in it may be worth a lie.

    Raises:
        GoneError: it belongs to another caller.
        InvalidRequestError: it belongs to another request, or that is no start.
    """
    try:
        start = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        seed, created, prompt_sum, owner_sum, body_sum = _START.unpack_from(start)
        kind, request_id, *checkpoints = start[_START.size :].decode().split("\0")
        if not checkpoints or created >= _SECONDS:
            raise ValueError("too short, or out of range")
    except (ValueError, struct.error, binascii.Error) as error:
        raise InvalidRequestError("Last-Event-ID: no id of an event", HEADER) from error
    if owner_sum != crc32(owner.encode()):
        raise GoneError("Last-Event-ID: no record of this stream is kept")
    if body_sum != crc32(body):
        raise InvalidRequestError("Last-Event-ID: the stream began with another body", HEADER)
    every = _each(checkpoints, num_choices)
    return Head(
        kind, owner, request_id, created, seed, prompt_sum, every, scenario, placement, body
    )


def _each(checkpoints: Sequence[str], num_choices: int) -> tuple[str, ...]:
    if len(checkpoints) not in (1, num_choices):
        raise GoneError("Last-Event-ID: another stream has this key")
    return tuple(checkpoints) * (num_choices if len(checkpoints) == 1 else 1)
