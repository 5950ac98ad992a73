"""Bytes with which attackers have two readers of HTTP differ, or fill logs, at the HTTP ports."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from kvmesh.runtime.http_connection import HttpConnection
from services.gateway.config import HttpConfig
from services.gateway.fronts.http import http_refusal
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack

BODY = json.dumps({"model": MODEL, "prompt": "one", "max_tokens": 2}).encode()
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d" % len(BODY)
TE = b"Transfer-Encoding: chunked"
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
"""Stands behind each request; who answers it took the first one to have ended before."""
KEY = b"sk-of-a-tenant"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One for all tests here: requests that are refused leave nothing."""
    http = HttpConfig(port=0, max_body_bytes=1 << 16)
    async with gateway_stack(tmp_path_factory.mktemp("hostile"), http=http) as stack:
        yield stack
        await stack.idle()


def head(*headers: bytes, line: bytes = b"POST /v1/completions HTTP/1.1") -> bytes:
    return b"\r\n".join([line, b"Host: x", *headers, b"", b""])


async def said(stack: Stack, raw: bytes) -> bytes:
    """All that comes back until the gateway closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
    try:
        writer.write(raw)
        return await reader.read()
    finally:
        writer.close()


UNREADABLE = {
    "two lengths": head(LENGTH, b"Content-Length: 0") + BODY,
    "the same length twice": head(LENGTH, LENGTH) + BODY,
    "a list of lengths": head(b"Content-Length: 5, 5") + BODY,
    "a signed length": head(b"Content-Length: +5") + BODY,
    "a length with an underscore": head(b"Content-Length: 5_0") + BODY,
    "coding and length": head(TE, LENGTH) + CHUNKED,
    "length and coding": head(LENGTH, TE) + CHUNKED,
    "an unknown coding": head(b"Transfer-Encoding: xchunked") + CHUNKED,
    "two codings": head(TE, b"Transfer-Encoding: identity") + CHUNKED,
    "a space before the colon": head(TE.replace(b":", b" :"), LENGTH) + BODY,
    "a folded header": head(b"Transfer-Encoding:\r\n chunked", LENGTH) + BODY,
    "a bare line feed": head(b"X: a\nContent-Length: 0", LENGTH) + BODY,
    "a bare carriage return": head(b"X: a\rContent-Length: 0", LENGTH) + BODY,
    "line feeds alone": head(LENGTH).replace(b"\r\n", b"\n") + BODY,
    "a zero byte": head(b"X: a\0b", LENGTH) + BODY,
    "a chunk size in Python's way": head(TE) + b"0x" + CHUNKED,
    "chunks with line feeds alone": head(TE) + CHUNKED.replace(b"\r\n", b"\n"),
    "a chunk that ends elsewhere": head(TE) + CHUNKED.replace(b"\r\n0", b"XX0"),
    "a line feed in a chunk extension": head(TE) + CHUNKED.replace(b"\r\n", b";a\n\r\n", 1),
    "two hosts": head(b"Host: y", LENGTH) + BODY,
    "no host": head(LENGTH).replace(b"Host: x\r\n", b"") + BODY,
    "a version that is none": head(LENGTH, line=b"POST /v1/completions HTTP/9.9") + BODY,
    "a target that is none": head(LENGTH, line=b"POST http://[/v1/completions HTTP/1.1") + BODY,
    "no line ends": b"x" * 20_000,
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.asyncio(loop_scope="module")
async def test_who_could_be_read_in_two_ways_is_refused_and_cut(stack: Stack, name: str) -> None:
    answer = await said(stack, UNREADABLE[name] + SMUGGLED)
    answer_head, _, body = answer.partition(b"\r\n\r\n")
    assert answer_head.splitlines()[0].split()[1] == b"400"
    assert b"Server: kvmesh" in answer_head
    error = json.loads(body)["error"]  # and nothing after it
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("not HTTP: ")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_only_unusual_is_read_as_it_must_be(stack: Stack) -> None:
    extended = CHUNKED.replace(b"\r\n", b";a=b\r\n", 1)
    usual = [
        head(TE) + extended,
        head(TE) + CHUNKED.replace(b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n"),
        head(LENGTH, line=b"POST http://other/v1/completions HTTP/1.1") + BODY,
        b"\r\n" + head(LENGTH) + BODY,
    ]
    last = head(LENGTH, b"Connection: close") + BODY
    answer = await said(stack, b"".join(usual) + last)
    assert answer.count(b"HTTP/1.1 200 OK") == len(usual) + 1
    old = await said(stack, head(LENGTH, line=b"POST /v1/completions HTTP/1.0") + BODY)
    assert old.startswith(b"HTTP/1.0 200 OK")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_would_have_to_be_unpacked_is_refused(stack: Stack) -> None:
    body = gzip.compress(BODY)
    for path in (b"/v1/completions", b"/v1/responses", b"/tokenize"):
        for coding in (b"gzip", b"deflate", b"x, gzip"):
            line = b"POST " + path + b" HTTP/1.1"
            coded = (b"Content-Encoding: " + coding, b"Connection: close")
            answer = await said(
                stack, head(b"Content-Length: %d" % len(body), *coded, line=line) + body
            )
            assert answer.startswith(b"HTTP/1.1 415 "), path
            assert b"send it as it is" in answer
    plain = (LENGTH, b"Content-Encoding: identity", b"Connection: close")
    assert (await said(stack, head(*plain) + BODY)).startswith(b"HTTP/1.1 200 ")


async def test_what_is_packed_stays_so() -> None:
    """Not even before anybody looks at it."""
    packed, seen = gzip.compress(bytes(1 << 20)), list[bytes]()

    async def handle(request: web.BaseRequest) -> web.Response:
        seen.append(await request.read())
        return web.Response()

    loop = asyncio.get_running_loop()
    http = web.Server(handle)
    server = await loop.create_server(
        lambda: HttpConnection(http, loop, 75.0, http_refusal), "127.0.0.1", 0
    )
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    headers = {"Content-Encoding": "gzip"}
    async with (
        aiohttp.ClientSession(url) as session,
        session.post("/", data=packed, headers=headers) as answer,
    ):
        assert answer.status == 200
    assert seen == [packed]
    await http.shutdown()
    server.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_read_is_not_logged(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    await said(stack, head(b"Authorization : Bearer " + KEY, LENGTH) + BODY)
    await said(stack, head(LENGTH, b"Content-Encoding: gzip", b"Connection: close") + BODY)
    async with aiohttp.ClientSession(stack.url) as session, session.get("/health") as health:
        assert health.status == 200
    assert KEY.decode() not in caplog.text
    assert [each for each in caplog.records if each.name.startswith("services")] == []
