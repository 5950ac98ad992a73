"""How a stream began: what another gateway has to know of it besides its tokens.

Whole in the journal. As long as that may not hold it, the ids of its events have the part of it
that a client cannot tell by sending its request again: the start.
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
    """A stream's request, and what was settled when it came.

    Attributes:
        kind: which API it came in by.
        owner: tenant that may go on with it.
        created: seconds since the epoch, as in its events.
        seed: of the call.
        prompt_sum: of the prompts' token ids; another sum, another model or day.
        checkpoints: fingerprint of the one that serves it, for each generation.
        body: as the client sent it.
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
        """Generations."""
        return len(self.checkpoints)


_FIELDS = tuple(field.name for field in fields(Head) if field.name != "body")
_START = struct.Struct("<QQIII")
"""Seed, seconds, and sums of the prompt, the owner and the body; then words with NULs between."""
_SECONDS = 1 << 40


def head_bytes(head: Head) -> bytes:
    """A head as the journal has it; the body stays as it is."""
    found = {name: getattr(head, name) for name in _FIELDS}
    return json.dumps(found).encode() + b"\n" + head.body


def head_of(raw: bytes) -> Head:
    """What `head_bytes` gave.

    Raises:
        ValueError, LookupError, TypeError: that is no head.
    """
    found, _, body = raw.partition(b"\n")
    told = json.loads(found)
    return Head(**{**told, "checkpoints": tuple(told["checkpoints"])}, body=body)


def start_text(head: Head) -> str:
    """A head without what the client sends again: its request and who it is; these by a sum."""
    checkpoints = head.checkpoints
    told = checkpoints[:1] if len(set(checkpoints)) == 1 else checkpoints
    sums = (head.prompt_sum, crc32(head.owner.encode()), crc32(head.body))
    words = "\0".join((head.kind, head.request_id, *told))
    start = _START.pack(head.seed, head.created, *sums) + words.encode()
    return urlsafe_b64encode(start).decode().rstrip("=")


def head_of_start(
    text: str, owner: str, body: bytes, num_choices: int, scenario: str, placement: str
) -> Head:
    """The head of a stream whose client sends its request again.

    Whoever says so may be right or not: nothing of it may be worth a lie.

    Raises:
        GoneError: it is another caller's.
        InvalidRequestError: it was another request, or that is no start.
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
        raise GoneError("Last-Event-ID: nothing is kept of this stream")
    if body_sum != crc32(body):
        raise InvalidRequestError("Last-Event-ID: that stream has another body", HEADER)
    every = _each(checkpoints, num_choices)
    return Head(
        kind, owner, request_id, created, seed, prompt_sum, every, scenario, placement, body
    )


def _each(checkpoints: Sequence[str], num_choices: int) -> tuple[str, ...]:
    if len(checkpoints) not in (1, num_choices):
        raise GoneError("Last-Event-ID: another stream has this key")
    return tuple(checkpoints) * (num_choices if len(checkpoints) == 1 else 1)
