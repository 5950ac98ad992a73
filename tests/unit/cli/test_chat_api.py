"""The chat endpoint's client against a real socket that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from kvmesh.cli.chat_api import Answer, ChatApi, ChatError, Conversation, Piece

PIECES = (
    b'data: {"choices":[{"delta":{"role":"assistant"},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{"reasoning_content":"hm","reasoning":"hm"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"Hel"},"finish_reason":null}]}\n\n'
    b": a comment\n\n"
    b'data: {"choices":[{"delta":{"content":"lo"},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)


@asynccontextmanager
async def server(body: bytes, status: int = 200) -> AsyncIterator[ChatApi]:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=body, status=status, headers={"x-kvmesh-decode-worker": "d0"})

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            yield ChatApi(session, [f"http://127.0.0.1:{runner.addresses[0][1]}"], "", {})
    finally:
        await runner.cleanup()


async def read(api: ChatApi) -> tuple[list[Piece], Answer]:
    answer = Answer()
    return [piece async for piece in api.stream("m", Conversation(), answer)], answer


async def test_pieces_and_numbers() -> None:
    async with server(PIECES + b"data: [DONE]\n\n") as api:
        pieces, answer = await read(api)
    assert pieces == [("hm", ""), ("", "Hel"), ("", "lo")]
    assert answer.thinking == "hm"
    assert (answer.text, answer.finish_reason, answer.worker) == ("Hello", "stop", "d0")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (9, 4, 2)
    assert 0 < answer.ttft_s <= answer.elapsed_s


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (PIECES, 200, "ended before its last event"),
        (b'data: {"error":{"message":"moved too often"}}\n\n', 200, "moved too often"),
        (b'{"error":{"message":"all slots are taken"}}', 503, "503: all slots are taken"),
        (b'{"error":{"message":"no API key"}}', 401, "no API key; .*KVMESH_API_KEY"),
        (b"<html>nginx</html>", 502, "502: <html>nginx</html>"),
        (b"data: {not json\n\n", 200, "Expecting"),
    ],
)
async def test_failures_say_what_happened(body: bytes, status: int, says: str) -> None:
    async with server(body, status) as api:
        with pytest.raises(ChatError, match=says):
            await read(api)


async def test_the_first_model() -> None:
    async with server(b'{"data":[{"id":"pydoc"}]}') as api:
        assert await api.first_model() == "pydoc"
    for other in (b"<html>", b"[]", b'{"data":[]}'):
        async with server(other) as api:
            with pytest.raises(ChatError, match="does not speak"):
                await api.first_model()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ChatError, match=r"no gateway answers at http://127.0.0.1:1"):
            await ChatApi(session, ["http://127.0.0.1:1"], "", {}).first_model()


def test_a_conversation_remembers_and_forgets() -> None:
    talk = Conversation("Be brief.")
    assert not talk.undo()
    talk.ask("a")
    talk.answered("A")
    talk.ask("b")
    assert [each["content"] for each in talk.messages()] == ["Be brief.", "a", "A", "b"]
    assert talk.undo()
    assert talk.undo()
    assert talk.messages() == [{"role": "system", "content": "Be brief."}]
    talk.ask("c")
    talk.reset()
    talk.system = ""
    assert talk.messages() == []


def _event(number: int, text: str) -> bytes:
    body = {"choices": [{"delta": {"content": text}}]}
    return f"id: key:{number}\ndata: {json.dumps(body)}\n\n".encode()


@asynccontextmanager
async def gateway(answers: list[tuple[int, bytes]], seen: list[str]) -> AsyncIterator[str]:
    """Answers one request after the other and cuts the connection; behind the last it is gone."""

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Last-Event-ID", ""))
        if not answers:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        status, body = answers.pop(0)
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        await response.write(body)
        if status == 200 and not body.endswith(DONE):
            assert request.transport is not None
            request.transport.close()
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


LOST = b'data: {"error":{"message":"stops","code":"draining"}}\n\ndata: [DONE]\n\n'
DONE = b"data: [DONE]\n\n"


async def test_a_cut_answer_goes_on_where_it_was() -> None:
    first = [
        (200, _event(1, "a") + _event(2, "b") + b'id: key:3\ndata: {"choi'),  # half an event
        (503, b"nobody is here"),
        (200, _event(4, "d") + DONE),
    ]
    second = [(200, _event(3, "c") + LOST), (200, b"")]
    seen: list[str] = []
    async with (
        gateway(first, seen) as one,
        gateway(second, seen) as other,
        aiohttp.ClientSession() as session,
    ):
        pieces, answer = await read(ChatApi(session, [one, other], "", {}))
    assert answer.text == "".join(piece.text for piece in pieces) == "abcd"
    assert seen == ["", "key:2", "key:3", "key:3", "key:3"]


async def test_an_answer_that_cannot_go_on_says_so() -> None:
    seen: list[str] = []
    async with (
        gateway([(200, _event(1, "a")), (410, b"{}")], seen) as url,
        aiohttp.ClientSession() as session,
    ):
        with pytest.raises(ChatError, match="410: the answer was cut and cannot go on"):
            await read(ChatApi(session, [url], "", {}))
    assert seen == ["", "key:1"]
    cut = [(200, _event(1, "a") + b"id:\n" + _event(2, "b")[10:])]  # the journal is behind
    async with gateway(cut, seen) as url, aiohttp.ClientSession() as session:
        with pytest.raises(ChatError, match="http://127"):
            await read(ChatApi(session, [url, url], "", {}))
    assert seen[2:] == [""], "it would get tokens again"


async def test_an_answer_begins_at_the_gateway_that_is_there() -> None:
    seen: list[str] = []
    async with (
        gateway([(200, _event(1, "a") + DONE)], seen) as url,
        aiohttp.ClientSession() as session,
    ):
        _, answer = await read(ChatApi(session, ["http://127.0.0.1:1", url], "", {}))
        assert answer.text == "a"
        with pytest.raises(ChatError):
            await read(ChatApi(session, ["http://127.0.0.1:1"], "", {}))
