"""What the benchmark of paced links says of decisions, and what its relay does to bytes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from benchmarks.paced_link import FRONT, Pace, free_port, paced_link
from benchmarks.prefix_links import targets
from kvmesh.core.fetch_reason import FetchReason


def row(share: float, reason: FetchReason, *, right: bool = True) -> dict[str, Any]:
    return {"share": share, "decision": reason.value, "right": right}


def test_the_decision_has_to_flip_where_it_pays_no_more() -> None:
    rows = [row(0.1, FetchReason.FETCH), row(0.6, FetchReason.FETCH), row(1.2, FetchReason.SLOW)]
    assert all(target.met for target in targets(rows))
    rows.append(row(2.0, FetchReason.FETCH, right=False))
    wrong, slowest, fastest = targets(rows)
    assert (wrong.value, wrong.met) == (1, False)
    assert (slowest.value, slowest.met) == (2.0, False)
    assert fastest.met


def test_without_a_flip_there_is_nothing_to_judge_it_by() -> None:
    _, _, fastest = targets([row(0.1, FetchReason.FETCH)])
    assert fastest.met is None


async def test_bytes_wait_for_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    pace = Pace(bytes_s=1000.0)
    for _ in range(3):
        await pace.wait(500)
    assert pauses == [0.5, 1.0, 1.5]
    await Pace().wait(500)
    assert len(pauses) == 3, "a link without a bound waits for nothing"


async def test_a_paced_link_changes_no_byte() -> None:
    content = random.Random(1).randbytes(300_000)
    port = free_port()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(len(content)))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    async with server, paced_link(port, Pace(bytes_s=1e9)):
        reader, writer = await asyncio.open_connection(FRONT, port)
        writer.write(content)
        assert await reader.read(-1) == content
        writer.close()
        await writer.wait_closed()
