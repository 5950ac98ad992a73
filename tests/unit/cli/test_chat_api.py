"""The chat endpoint's client against a real socket that says what a test wants."""

from __future__ import annotations

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
            yield ChatApi(session, f"http://127.0.0.1:{runner.addresses[0][1]}", "", {})
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
            await ChatApi(session, "http://127.0.0.1:1", "", {}).first_model()


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
