"""How a stream began is told by its id and its request together, and by nothing less."""

from __future__ import annotations

import struct
from base64 import urlsafe_b64encode

import pytest

from kvmesh.core.errors import GoneError, InvalidRequestError
from kvmesh.core.values import changed
from services.gateway.request.stream_head import (
    Head,
    head_bytes,
    head_of,
    head_of_start,
    start_text,
)

BODY = b'{"prompt":\n"hi"}'
HEAD = Head("text_completion", "me", "näme", 7, 2**64 - 1, 5, ("a", "b"), "docs", "auto", BODY)
WHERE = ("docs", "auto")
SAME = changed(HEAD, checkpoints=("a", "a"))


@pytest.mark.parametrize("head", [HEAD, SAME, changed(HEAD, checkpoints=("",))])
def test_a_head_is_read_as_it_was_written(head: Head) -> None:
    assert head_of(head_bytes(head)) == head
    start = start_text(head)
    assert head_of_start(start, "me", BODY, head.num_choices, *WHERE) == head


def test_one_name_of_a_checkpoint_is_enough() -> None:
    assert len(start_text(SAME)) < len(start_text(HEAD))


def test_others_and_other_requests_are_sent_away() -> None:
    start = start_text(HEAD)
    with pytest.raises(GoneError, match="no record of this stream is kept"):
        head_of_start(start, "you", BODY, 2, *WHERE)
    with pytest.raises(InvalidRequestError, match="another body"):
        head_of_start(start, "me", BODY + b" ", 2, *WHERE)
    with pytest.raises(GoneError, match="another stream"):
        head_of_start(start, "me", BODY, 3, *WHERE)


def _start(seconds: int, *words: str) -> bytes:
    return struct.pack("<QQIII", 1, seconds, 0, 0, 0) + "\0".join(words).encode()


@pytest.mark.parametrize(
    "told",
    [
        b"",
        _start(7)[:-1],
        _start(7, "k", "name"),
        _start(1 << 40, "k", "name", "a"),
        _start(7, "k", "name", "a") + b"\xff",
    ],
)
def test_what_is_no_start_is_said(told: bytes) -> None:
    text = urlsafe_b64encode(told).decode().rstrip("=")
    with pytest.raises(InvalidRequestError, match="no id"):
        head_of_start(text, "me", BODY, 1, *WHERE)


@pytest.mark.parametrize("text", ["a", "gICA", "W1tb", "____"])
def test_noise_is_no_start(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="no id"):
        head_of_start(text, "me", BODY, 1, *WHERE)
