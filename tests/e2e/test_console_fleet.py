"""The console's page before a thousand workers: drawn, bounded, and again every second."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files

import pytest
from aiohttp import web
from playwright.async_api import Page

from kvmesh.console.request_log import RequestLog
from kvmesh.console.sampler import Sampler
from kvmesh.console.share import share_of
from kvmesh.console.snapshot import ConsoleView, history, snapshot
from kvmesh.core.details import FleetWorker, LinkDetail
from kvmesh.core.types import Role, WorkerId
from tests.browser import headless_browser, needs_browser
from tests.unit.console.examples import fleet_worker, with_detail

pytestmark = [needs_browser, pytest.mark.timeout(120)]

NUM_WORKERS, MAX_ROWS, MAX_NODES = 1000, 200, 12
TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}


def fleet() -> list[FleetWorker]:
    """Half prefill workers, each with a link to a decode worker; the last one drains."""
    workers = []
    for n in range(NUM_WORKERS // 2):
        link = LinkDetail(WorkerId(f"d{n}"), "tcp", n, 0, 0.0, 0.0, 0.001, 0, 0)
        workers.append(with_detail(fleet_worker(f"p{n}"), link))
        workers.append(fleet_worker(f"d{n}", Role.DECODE, decode_running=n % 7))
    last = fleet_worker(workers[-1].info.worker_id, Role.DECODE, draining=True)
    return [*workers[:-1], dataclasses.replace(last, detail=workers[-1].detail)]


def message(
    workers: list[FleetWorker],
    before: list[FleetWorker] | None = None,
    *,
    fresh: bool = True,
    kvmanager: bool | None = None,
) -> dict[str, object]:
    """What the page gets.

    Args:
        before: the fleet one second ago.
        fresh: whether a scheduler tells.
        kvmanager: whether it reaches its kvmanager.
    """
    sampler = Sampler()
    share = share_of(RequestLog(), {}, 1.0, with_rows=True)
    sampler.take(workers if before is None else before, share, 0.0)
    sampler.take(workers, share, 1.0, fresh=fresh)
    view = ConsoleView(1.0, "m", "0", fresh, workers, share, sampler, kvmanager)
    return {**snapshot(view), "history": history(sampler.samples)}


@asynccontextmanager
async def page_of(content: dict[str, object]) -> AsyncIterator[str]:
    async def shown(_request: web.Request) -> web.Response:
        return web.json_response(content)

    async def events(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        second = json.dumps({**content, "now": 2.0})
        await stream.write(f"event: snapshot\ndata: {second}\n\n".encode())
        await asyncio.Event().wait()  # until the page is closed
        return stream

    async def static(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        text = (files("kvmesh.console") / "static" / name).read_text()
        return web.Response(text=text, content_type=TYPES[name.rpartition(".")[2]])

    app = web.Application()
    app.router.add_get("/console/snapshot", shown)
    app.router.add_get("/console/events", events)
    app.router.add_get("/console/{name}", static)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/console/index.html"
    finally:
        await runner.cleanup()


async def test_a_thousand_workers_are_shown_in_parts() -> None:
    async with page_of(message(fleet())) as url, headless_browser() as browser:
        page = await browser.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(url)
        await page.wait_for_selector("body[data-drawn='2']")
        assert await page.inner_text("#worker-count") == f"{NUM_WORKERS} in 1 cluster"
        for table, total in (("workers", NUM_WORKERS), ("links", NUM_WORKERS // 2)):
            rows = await page.locator(f"#{table} tbody tr").all_inner_texts()
            assert len(rows) == MAX_ROWS + 1
            assert rows[-1] == f"and {total - MAX_ROWS} more"
        # Whoever is not ready is never left out, and the links that carried most are first.
        assert "draining" in await page.inner_text("#workers tbody")
        assert "d499" in await page.locator("#links tbody tr").first.inner_text()
        flow = await page.inner_text("#flow")
        assert f"and {NUM_WORKERS - MAX_NODES} more workers" in flow
        assert complaints == []


POD = "kvmesh-prefill-7d9f8c6b5-x2x4z"
P, D = fleet_worker(POD), fleet_worker("d", Role.DECODE, decode_running=3)


STATES = [
    ([P, D], True, True, "live"),
    ([P, D], True, False, "no kvmanager: cached prefixes unknown"),
    ([P, D], False, False, "no scheduler: last known fleet"),
    ([D], True, None, "no prefill worker is ready"),
    ([P], True, None, "no decode worker is ready"),
    ([], True, None, "no worker is ready"),
]


async def test_what_is_missing_is_said_and_fits_a_telephone() -> None:
    async with headless_browser() as browser:
        for now, fresh, kvmanager, state in STATES:
            page = await browser.new_page(viewport={"width": 390, "height": 800})
            async with page_of(message(now, [P, D], fresh=fresh, kvmanager=kvmanager)) as url:
                await check_state(page, url, now, "0" if fresh else "–", state)
                await page.close()


async def check_state(
    page: Page, url: str, now: list[FleetWorker], tokens: str, state: str
) -> None:
    await page.goto(url)
    await page.wait_for_selector("body[data-drawn='2']")
    assert await page.inner_text("#state") == state
    figure = page.locator(".figure", has_text="tokens generated")
    assert (await figure.inner_text()).startswith(tokens)
    left = await page.locator("#workers tr.gone").all_inner_texts()
    assert [row.split()[0] for row in left] == [w.info.worker_id for w in (P, D) if w not in now]
    # Nothing is wider than the screen but tables, which scroll.
    width = await page.evaluate("[document.body.scrollWidth, flow.scrollWidth - flow.clientWidth]")
    assert width == [390, 0]
    names = await page.locator(".flow .name").all_text_contents()
    shortened = {P.info.worker_id: "…c6b5-x2x4z", "d": "d"}
    assert names == ["gateway", *(shortened[w.info.worker_id] for w in (P, D) if w in now)]
