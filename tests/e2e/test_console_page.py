"""The console in a real browser, in front of a real mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from playwright.async_api import Browser, HttpCredentials, Page

from tests.browser import headless_browser, needs_browser
from tests.e2e.api_client import ApiClient, placed
from tests.mesh_processes import Flags, Mesh, running_mesh

TOKEN = "a token for the tests"
DARK, LIGHT = "rgb(14, 18, 22)", "rgb(244, 245, 243)"

pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.timeout(180)]


@dataclass
class Complaints:
    """What a page complained about, and what it asked for elsewhere."""

    found: list[str] = field(default_factory=list)

    def listen(self, page: Page, origin: str) -> None:
        page.on("console", lambda message: self._note(message.type == "error", message.text))
        page.on("pageerror", lambda error: self._note(True, str(error)))
        page.on("requestfailed", lambda request: self._note(True, f"failed: {request.url}"))
        page.on(
            "request",
            lambda request: self._note(not request.url.startswith(origin), request.url),
        )

    def _note(self, is_bad: bool, text: str) -> None:
        # A stream that is open when its page is closed fails, and that is all right.
        if is_bad and "/console/events" not in text:
            self.found.append(text)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """One for all tests here: processes and browsers take their time to start."""
    folder = tmp_path_factory.mktemp("console")
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    step: Flags = {"engine.fake-step-s": 0.005}
    flags: dict[str, Flags] = {
        "gateway": {"server.admin.port": 0, "server.admin.token-file": token_file},
        "scheduler": {
            "planning.roles": "off",
            "planning.remote-cluster": "far",
            "planning.threshold-tokens": 300,
        },
        "prefill": step,
        "decode": step,
    }
    async with running_mesh(folder, 1, 2, flags=flags) as mesh:
        yield mesh


async def opened(browser: Browser, mesh: Mesh, scheme: str, complaints: Complaints) -> Page:
    origin = f"http://{mesh['gateway'].address_of('admin_serving')}"
    context = await browser.new_context(
        color_scheme="dark" if scheme == "dark" else "light",
        http_credentials=HttpCredentials(username="any", password=TOKEN),
        viewport={"width": 1280, "height": 900},
    )
    page = await context.new_page()
    complaints.listen(page, origin)
    await page.goto(f"{origin}/console")
    await page.wait_for_selector("body[data-drawn]")
    return page


async def test_the_console_shows_the_mesh_and_a_request(mesh: Mesh) -> None:
    complaints = Complaints()
    async with headless_browser() as browser, ApiClient(mesh.url) as client:
        page = await opened(browser, mesh, "light", complaints)
        await page.wait_for_selector(".flow .node[data-role=decode] >> nth=1")
        names = await page.locator("#workers .role").all_inner_texts()
        assert names == ["decode-0", "decode-1", "prefill-0"]
        state = await page.locator("#state").inner_text()
        assert state == "live" or state.startswith("slower, no native code"), state

        threshold = page.locator(".chart", has_text="Offload threshold")
        await threshold.locator("b", has_text="300").wait_for()

        headers = {**placed("disaggregated"), "x-request-id": "shown"}
        answer = await client.complete(list(range(10, 300)), max_tokens=20, headers=headers)
        row = page.locator("#requests tr", has_text="shown-")
        await row.wait_for()
        assert answer.prefill_worker in await row.inner_text()
        # KV that went over the link is in the drawing's data and in the table.
        await page.wait_for_selector(f"#links tr:has-text('{answer.decode_worker}')")

        await page.fill("#find-id", "shown")
        await page.press("#find-id", "Enter")
        await page.wait_for_selector("#timeline[open] .phase[data-phase=decode]")
        drawn = await page.locator("#timeline .phase").evaluate_all(
            "bars => bars.map(bar => bar.dataset.phase)"
        )
        assert drawn == ["waiting", "prefill", "handoff", "decode"]
        assert answer.decode_worker in await page.locator("#timeline").inner_text()
    assert complaints.found == []
    await mesh.idle()


async def test_light_and_dark_and_a_gateway_that_goes_away(mesh: Mesh) -> None:
    complaints = Complaints()
    ground = "getComputedStyle(document.body).backgroundColor"
    async with headless_browser() as browser:
        for scheme, colour in (("light", LIGHT), ("dark", DARK)):
            page = await opened(browser, mesh, scheme, complaints)
            assert await page.evaluate(ground) == colour
            await page.close()
        page = await opened(browser, mesh, "light", complaints)
        await page.click("#theme")
        assert await page.evaluate(ground) == DARK
        await page.reload()
        await page.wait_for_selector("body[data-drawn]")
        assert await page.evaluate(ground) == DARK, "the choice is kept"
        assert complaints.found == []

        mesh["gateway"].kill()
        await page.wait_for_selector("#state[data-state=lost]")
        await mesh.restart("gateway")
