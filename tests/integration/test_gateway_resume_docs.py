"""The lines of docs/sdk.md that go on with a stream over plain HTTP do so as they stand there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.integration.gateway_stack import Stack
from tests.integration.test_gateway_resume import events_of, post, stacks
from tests.redis_server import redis_process


@contextlib.asynccontextmanager
async def cut_after(url: str, num_events: int) -> AsyncIterator[str]:
    """A way to a gateway that breaks in the middle of a stream, each time; its URL."""
    host, _, port = url.removeprefix("http://").rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_gateway, to_gateway = await asyncio.open_connection(host, int(port))

        async def ask() -> None:
            while data := await reader.read(65_536):
                to_gateway.write(data)

        asking, seen = asyncio.create_task(ask()), 0
        while seen < num_events and (data := await from_gateway.readline()):
            writer.write(data)
            seen += data.startswith(b"data:")
        asking.cancel()
        to_gateway.close()
        writer.close()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())


async def test_the_lines_in_the_docs_go_on_at_another_gateway(tmp_path: Path) -> None:
    with redis_process(tmp_path) as redis:
        async with stacks(tmp_path, redis) as (one, other):
            await _say_the_lines(one, other)


async def _say_the_lines(one: Stack, other: Stack) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sdk.md").read_text(encoding="utf-8")
    (lines,) = [part for part in page.split("```python\n") if part.startswith("import http.client")]
    lines, url = lines.split("```")[0], '"http://127.0.0.1:8000"'
    asked = {"prompt": "A story", "max_tokens": 50, "stream": True}
    events = events_of((await post(one, "completions", asked))[1])
    whole = "".join(json.loads(event.data)["choices"][0]["text"] for event in events[:-1])
    async with cut_after(one.url, 7) as broken:
        lines = lines.replace(url, f'"{broken}"', 1).replace(url, f'"{other.url}"', 1)
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", lines, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await program.communicate()
    assert program.returncode == 0
    assert said.count(b"[") == 1, "it was cut once"
    told = re.sub(r"\[[^\]]*\]\n", "", said.decode())
    assert told == whole
    assert other.gateway.metrics.value("kvmesh_gateway_resumes_total", outcome="resumed") == 1
