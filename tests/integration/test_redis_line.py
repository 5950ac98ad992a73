"""The pipelined connection to a real Redis, and to something that is none."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio as redis

from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.redis_line import RedisLines
from kvmesh.metadata.server_binary import RedisProcess
from kvmesh.metadata.store import StoreUnavailableError
from tests.redis_server import redis_process

ECHO = "return {ARGV[1], ARGV[2]}"
SLOW = "local n = 0; for i = 1, 3000000 do n = n + 1 end; return ARGV[2]"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisProcess]:
    with redis_process() as process:
        yield process


@pytest.fixture
async def client(server: RedisProcess) -> AsyncIterator[RedisClient]:
    client = RedisClient(RedisConfig(server.url, key_prefix="t:", timeout_s=10.0))
    yield client
    await client.close()


async def test_answers_come_to_their_questions(client: RedisClient) -> None:
    found = await asyncio.gather(*(client.ask(ECHO, f"word {n}") for n in range(100)))
    assert found == [[b"{t:}", f"word {n}".encode()] for n in range(100)]
    line = await (await client._current()).lines.line()
    assert line.num_waiting == 0


async def test_a_caller_that_gives_up_does_not_shift_the_answers(client: RedisClient) -> None:
    await client.ask(SLOW, "loaded")
    given_up = asyncio.create_task(client.ask(SLOW, "nobody waits"))
    await asyncio.sleep(0)
    asked = asyncio.create_task(client.ask(ECHO, "mine"))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await asked == [b"{t:}", b"mine"]


async def test_a_redis_that_forgot_its_scripts_gets_them_again(
    client: RedisClient, server: RedisProcess
) -> None:
    await client.ask(ECHO, "a")
    async with redis.Redis.from_url(server.url) as raw:
        await raw.script_flush()
    assert await client.ask(ECHO, "b") == [b"{t:}", b"b"]


async def test_an_error_of_redis_is_an_error_here(client: RedisClient) -> None:
    bad = "return redis.call('HGET', ARGV[1])"
    for _ in range(2):  # first the way that loads it, then the line
        with pytest.raises(StoreUnavailableError, match="rong number"):
            await client.ask(bad)
    assert await client.ask(ECHO, "still there") == [b"{t:}", b"still there"]


async def test_a_redis_that_stands_still_fails_who_asks_in_time() -> None:
    with redis_process() as server:
        client = RedisClient(RedisConfig(server.url, key_prefix="t:", timeout_s=0.1))
        await client.ask(ECHO, "a")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailableError, match="in time"):
                await client.ask(ECHO, "b")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert await client.ask(ECHO, "c") == [b"{t:}", b"c"]
        await client.close()


async def test_a_killed_redis_fails_what_waits_and_a_new_one_is_found() -> None:
    with redis_process() as first:
        client = RedisClient(RedisConfig(first.url))
        await client.ask(ECHO, "a")
        line = await (await client._current()).lines.line()
        waiting = asyncio.create_task(client.ask(SLOW, "x"))
    with pytest.raises(StoreUnavailableError):
        await waiting
    assert not line.is_open
    with pytest.raises(StoreUnavailableError, match="Connection"):
        await client.ask(ECHO, "b")
    port = int(first.url.rpartition(":")[2].partition("/")[0])
    with redis_process(port=port):
        assert await client.ask(ECHO, "c") == [b"{kvmesh:}", b"c"]
        await client.close()


async def test_a_password_and_a_database_are_said_first(server: RedisProcess) -> None:
    async with redis.Redis.from_url(server.url) as raw:
        await raw.config_set("requirepass", "secret")
        try:
            good = RedisLines(server.url.replace("/0", "/3"), "secret", 10.0)
            line = await good.line()
            assert b"db=3" in await line.ask("CLIENT", "INFO")
            good.close()
            for bad in (RedisLines(server.url, "wrong", 10.0), RedisLines(server.url, "", 10.0)):
                with pytest.raises(StoreUnavailableError, match="refuses"):
                    await bad.line()
        finally:
            await raw.config_set("requirepass", "")


@pytest.mark.parametrize("url", ["rediss://127.0.0.1:1/0", "unix:///tmp/none.sock"])
def test_what_is_not_plain_tcp_stays_with_the_pool(url: str) -> None:
    assert not RedisLines(url, "", 1.0).can_open


async def test_a_line_that_owes_an_answer_for_long_is_replaced() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.read(10)
        if len(writers) == 1:
            writer.write(b"+OK\r\n")  # lets it in, and then says nothing

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    lines = RedisLines(f"redis://127.0.0.1:{port}/0", "", 0.05)
    line = await lines.line()
    asked = asyncio.create_task(line.ask("PING"))

    async def until_replaced() -> None:
        while await lines.line() is line:
            await asyncio.sleep(0)

    with pytest.raises(StoreUnavailableError):  # the next one is not let in
        await until_replaced()
    with pytest.raises(StoreUnavailableError):
        await asked
    for writer in writers:
        writer.close()
    server.close()


async def test_bytes_that_are_no_answer_end_the_line() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400\r\n\r\n")
        await reader.read(10)
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(StoreUnavailableError):
        await RedisLines(f"redis://127.0.0.1:{port}/0", "", 5.0).line()
    server.close()
