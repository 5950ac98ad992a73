"""A headless browser for tests of the console, and which one it is."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, async_playwright

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

needs_browser = pytest.mark.skipif(
    not BROWSER, reason="no Chromium is installed; on Debian: apt-get install chromium"
)


@asynccontextmanager
async def headless_browser() -> AsyncIterator[Browser]:
    """The system's Chromium. Without its sandbox, which does not run as root."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            await browser.close()
