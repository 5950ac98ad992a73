"""Times that are nearer than a timer can tell, on the loop that services run on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from services.gateway.request.attempt import Attempt
from tests.integration.gateway_stack import CHAT, gateway_stack

AT_ONCE_S = 0.0002
"""A timer of uvloop that is due so soon is none."""


def test_what_is_due_at_once_breaks_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[dict[str, Any]] = []
    due = property(lambda _: asyncio.get_running_loop().time() + AT_ONCE_S)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, each: errors.append(each))
        async with gateway_stack(tmp_path) as stack, aiohttp.ClientSession() as session:
            with monkeypatch.context() as patched:
                patched.setattr(Attempt, "due", due)
                url = f"{stack.url}/v1/chat/completions"
                async with session.post(url, json=CHAT) as response:
                    assert response.status == 200
                    await response.read()
            await stack.idle()

    uvloop.run(run())
    assert errors == []
