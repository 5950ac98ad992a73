"""Our own reader of HTTP and aiohttp take and refuse the same bytes, in the same words."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from unittest import mock

import pytest
import pytest_asyncio

from services.gateway.config import HttpConfig
from services.gateway.fronts import http_direct, http_head
from services.gateway.fronts.http_direct import DirectHttp
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack

BODY = {"model": MODEL, "prompt": "one", "max_tokens": 2, "seed": 1}
LAST = b"GET /v1/models/none HTTP/1.1\r\nHost: x\r\nx-request-id: last\r\nConnection: close\r\n\r\n"
"""Ends a connection that the request before it left open."""
NUM_DRAWN = 80

Line = bytes


@dataclass(frozen=True, slots=True)
class Ways:
    """A gateway as it is, and one whose connections are aiohttp's from their first byte."""

    direct: Stack
    server: Stack
    num_direct: list[bytes]
    """Heads that our own reader took."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ways(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ways]:
    taken: list[bytes] = []
    plain_head = http_head.plain_head

    def noted(data: bytearray) -> object:
        found = plain_head(data)
        if found is not None:
            taken.append(bytes(data))
        return found

    folder = tmp_path_factory.mktemp
    http = HttpConfig(port=0, max_body_bytes=1 << 16)
    with mock.patch.object(http_direct, "plain_head", noted):
        async with gateway_stack(folder("direct"), http=http) as direct:
            with mock.patch.object(DirectHttp, "wrap", lambda _, factory: factory):
                async with gateway_stack(folder("server"), http=http) as server:
                    yield Ways(direct, server, taken)


def request(*headers: Line, body: bytes = b"", line: Line = b"", length: bytes = b"") -> bytes:
    body = body or json.dumps(BODY).encode()
    lines = [
        line or b"POST /v1/completions HTTP/1.1",
        b"x-request-id: same",
        *headers,
        b"Content-Length: " + (length or b"%d" % len(body)),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def said(stack: Stack, raw: bytes) -> bytes:
    """All that comes back until the connection ends, without what differs from call to call."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
    try:
        writer.write(raw + LAST)
        answer = await reader.read()
    finally:
        writer.close()
    answer = re.sub(rb"(?i)\r\nDate: [^\r]*", b"", answer)
    return re.sub(rb'"created":\d{10}', b'"created":0123456789', answer)


def parts_of(answer: bytes) -> list[tuple[bytes, frozenset[bytes], bytes]]:
    """Status line, headers in any order, and body of each answer."""
    found = []
    while answer:
        head, _, answer = answer.partition(b"\r\n\r\n")
        status, *headers = head.split(b"\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        size = int(length[1]) if length else len(answer)
        found.append((status, frozenset(line.lower() for line in headers), answer[:size]))
        answer = answer[size:]
    return found


HOST = b"Host: x"
CASES = {
    "plain": request(HOST),
    "as many headers as our reader takes": request(
        HOST, *(b"x-%d: y" % number for number in range(61))
    ),
    "one more": request(HOST, *(b"x-%d: y" % number for number in range(62))),
    "100 headers": request(HOST, *(b"x-%d: y" % number for number in range(97))),
    "129 headers": request(HOST, *(b"x-%d: y" % number for number in range(126))),
    "200 headers": request(HOST, *(b"x-%d: y" % number for number in range(197))),
    "a long header": request(HOST, b"x: " + b"y" * 7000),
    "a longer head than our reader takes": request(HOST, b"x: " + b"y" * 8100),
    "a header that is too long": request(HOST, b"x: " + b"y" * 9000),
    "no host": request(),
    "two hosts": request(HOST, HOST),
    "a header twice": request(HOST, b"x: 1", b"x: 2"),
    "an empty name": request(HOST, b": y"),
    "a space before the colon": request(HOST, b"x : y"),
    "no colon": request(HOST, b"xy"),
    "an empty value": request(HOST, b"x:"),
    "a tab": request(HOST, b"x:\ty\t"),
    "a byte that is not ASCII": request(HOST, b"x: \xe4"),
    "a control character": request(HOST, b"x: \x01"),
    "a length of 13 digits": request(HOST, length=b"%013d" % len(json.dumps(BODY))),
    "a negative length": request(HOST, length=b"-1"),
    "a length in hexadecimal": request(HOST, length=b"0x10"),
    "no body": request(HOST, length=b"0").partition(b"{")[0],
    "a body that is too long": request(HOST, body=b" " * (1 << 16) + b"{}"),
    "no JSON": request(HOST, body=b"{"),
    "another method": request(HOST, line=b"PUT /v1/completions HTTP/1.1"),
    "a small letter in the method": request(HOST, line=b"post /v1/completions HTTP/1.1"),
    "a query": request(HOST, line=b"POST /v1/completions?a=b HTTP/1.1"),
    "another path": request(HOST, line=b"POST /v1/completion HTTP/1.1"),
    "an older version": request(HOST, line=b"POST /v1/completions HTTP/1.0"),
    "two spaces": request(HOST, line=b"POST  /v1/completions HTTP/1.1"),
    "a connection that is kept": request(HOST, b"Connection: Keep-Alive"),
    "two at once": request(HOST) + request(HOST),
    "a deadline that is none": request(HOST, b"x-slo-ttft-ms: soon"),
}


def drawn(number: int) -> bytes:
    """A request of odd parts; most are nearly plain."""
    rng = random.Random(number)
    names = [
        b"x",
        b"X-Y",
        b"accept",
        b"user-agent",
        b"Authorization",
        b"traceparent",
        b"x_y",
        b"x/y",
    ]
    values = [b"", b"y", b"  y ", b"a\tb", b"\x7f", b'"q"', b"y" * rng.choice((10, 500, 3000))]
    headers = [HOST]
    for _ in range(rng.choice((0, 1, 3, 3, 10, 63, 64, 128))):
        name = rng.choice(names) + (b"%d" % rng.randrange(1000) if rng.random() < 0.9 else b"")
        colon = rng.choice((b":", b": ", b": ", b":\t", b" :" if rng.random() < 0.05 else b":"))
        headers.append(name + colon + rng.choice(values))
    rng.shuffle(headers)
    body = json.dumps(BODY | rng.choice(({}, {"n": 2}, {"temperature": 9}, {"prompt": "ü"})))
    return request(*headers, body=body.encode())


async def same(ways: Ways, raw: bytes) -> None:
    ours, theirs = await asyncio.gather(said(ways.direct, raw), said(ways.server, raw))
    assert parts_of(ours) == parts_of(theirs), raw[:600]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.asyncio(loop_scope="module")
async def test_both_ways_answer_alike(ways: Ways, name: str) -> None:
    await same(ways, CASES[name])


@pytest.mark.asyncio(loop_scope="module")
async def test_both_ways_answer_alike_whatever_is_drawn(ways: Ways) -> None:
    before = len(ways.num_direct)
    for number in range(NUM_DRAWN):
        await same(ways, drawn(number))
    assert NUM_DRAWN // 4 < len(ways.num_direct) - before < NUM_DRAWN


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bad_request_costs_a_good_one_before_it_nothing(ways: Ways) -> None:
    """The one difference: with both in one packet aiohttp refuses both in one answer."""
    bad = request(HOST, HOST)
    ours = parts_of(await said(ways.direct, request(HOST) + bad))
    assert [status.split()[1] for status, _, _ in ours] == [b"200", b"400"]
    assert ours[1:] == parts_of(await said(ways.server, bad))
    theirs = parts_of(await said(ways.server, request(HOST) + bad))
    assert [status.split()[1] for status, _, _ in theirs] == [b"400"]
