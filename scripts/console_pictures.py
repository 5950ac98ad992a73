"""Takes the pictures of docs/console.md: python -m scripts.console_pictures.

Starts a local stack with the embedded model, puts load on it, and photographs its console in
light and dark with the system's Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.async_api import Browser, async_playwright

from kvmesh.core.config import environment

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "images"
LOAD_S = 45
WIDTH = 1360
_COLOURS = 128


async def photograph(url: str) -> None:
    """Takes all pictures of a console under load."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no Chromium is installed; on Debian: apt-get install chromium")
    FOLDER.mkdir(exist_ok=True)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        await _page(browser, url, "dark")
        await _page(browser, url, "light")
        await browser.close()


async def _page(browser: Browser, url: str, scheme: str) -> None:
    page = await browser.new_page(
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": WIDTH, "height": 1150},
    )
    await page.goto(url)
    await page.wait_for_selector(".flow .label")  # KV is on its way
    _save(await page.screenshot(), f"console-{scheme}.png")
    if scheme == "light":
        await page.click("#requests tr:has-text('length') button")
        await page.wait_for_selector("#timeline[open] .phase[data-phase=decode]")
        _save(await page.locator("#timeline").screenshot(), "console-timeline.png")
    await page.close()


def _save(picture: bytes, name: str) -> None:
    """Keeps a picture small: a page of flat colours needs few."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(_COLOURS).save(FOLDER / name, optimize=True)
    print(f"docs/images/{name}")


async def _under_load(gateway: str, console: str) -> None:
    load = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", "bench", "serve", "--url", gateway),
        *("--requests", "4000", "--rate", "3", "--input-tokens", "220", "--output-tokens", "90"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        await asyncio.sleep(LOAD_S)  # so that the charts have something to show
        await photograph(console)
    finally:
        if load.returncode is None:
            load.terminate()
        await load.wait()


def main() -> None:
    """Starts a stack that runs this program again, inside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inside", action="store_true", help="a stack runs already")
    if parser.parse_args().inside:
        asyncio.run(_under_load(environment("KVMESH_URL"), environment("KVMESH_CONSOLE")))
        return
    inside = shlex.join([sys.executable, "-m", "scripts.console_pictures", "--inside"])
    with tempfile.TemporaryDirectory() as state:
        command = ("-m", "kvmesh.cli", "up", "--port", "0", "--state-dir", state, "--run", inside)
        code = asyncio.run(_run(sys.executable, *command))
    sys.exit(code)


async def _run(*command: str) -> int:
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    return await process.wait()


if __name__ == "__main__":
    main()
