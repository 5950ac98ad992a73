from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.openai import Endpoint
from services.gateway.fronts.http_head import MAX_HEAD_BYTES, plain_head

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: x\r\n"
LENGTH = b"Content-Length: 2\r\n"
PLAIN = LINE + HOST + LENGTH + b"\r\n"


def test_a_plain_head() -> None:
    raw = LINE + b"HOST: a:1\r\nX-Slo-TTFT-ms:\t 5 \r\ncontent-length: 12\r\nx:\r\n\r\n"
    head = plain_head(raw + b"{}")
    assert head is not None
    assert head.endpoint is Endpoint.CHAT
    assert head.headers == {"host": "a:1", "x-slo-ttft-ms": "5", "content-length": "12", "x": ""}
    assert (head.num_bytes, head.num_body_bytes) == (len(raw), 12)
    text = plain_head(PLAIN.replace(b"chat/", b""))
    assert text is not None
    assert text.endpoint is Endpoint.COMPLETION
    assert plain_head(PLAIN.replace(HOST, HOST + b"Connection: Keep-Alive\r\n")) is not None


@pytest.mark.parametrize(
    "raw",
    [
        PLAIN.replace(b"POST", b"GET"),
        PLAIN.replace(b"/v1", b"/v2"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PLAIN.replace(b" HTTP", b"?x=1 HTTP"),
        PLAIN.replace(b"POST ", b"POST  "),
        PLAIN.replace(HOST, b""),
        PLAIN.replace(LENGTH, b""),
        PLAIN.replace(LENGTH, LENGTH + LENGTH),
        PLAIN.replace(HOST, HOST + b"X: 1\r\nx: 2\r\n"),
        PLAIN.replace(HOST, HOST + b"Transfer-Encoding: chunked\r\n"),
        PLAIN.replace(HOST, HOST + b"Expect: 100-continue\r\n"),
        PLAIN.replace(HOST, HOST + b"Content-Encoding: gzip\r\n"),
        PLAIN.replace(HOST, HOST + b"Connection: close\r\n"),
        PLAIN.replace(HOST, HOST + b"Connection: upgrade\r\nUpgrade: h2c\r\n"),
        PLAIN.replace(HOST, HOST + b" folded\r\n"),
        PLAIN.replace(HOST, HOST + b"no colon\r\n"),
        PLAIN.replace(HOST, HOST + b"X : 1\r\n"),
        PLAIN.replace(HOST, HOST + b"X: \x00\r\n"),
        PLAIN.replace(HOST, HOST + b"X: \xff\r\n"),
        PLAIN.replace(HOST, HOST + b"X: a\nY: b\r\n"),
        PLAIN.replace(HOST, HOST + b"X: a\rY: b\r\n"),
        *(
            PLAIN.replace(b": 2", b": " + bad)
            for bad in (b"-1", b"+2", b"2,2", b"0x2", b"", b"2 2", b"1_0", b"9" * 13)
        ),
        PLAIN[:-1],
        LINE,
        b"",
        b"\r\n" + PLAIN,
        LINE + HOST + LENGTH + b"X: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n",
    ],
)
def test_what_is_not_plain(raw: bytes) -> None:
    assert plain_head(raw) is None


@given(
    at=st.integers(0, len(PLAIN) - 1),
    byte=st.sampled_from([bytes([value]) for value in (0, 9, 10, 13, 32, 58, 127, 200)]),
)
def test_a_damaged_head_is_never_another_length(at: int, byte: bytes) -> None:
    damaged = PLAIN[:at] + byte + PLAIN[at + 1 :]
    head = plain_head(damaged)
    assert head is None or (head.num_bytes, head.num_body_bytes) == (len(PLAIN), 2)
