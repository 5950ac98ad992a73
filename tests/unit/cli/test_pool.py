from __future__ import annotations

import asyncio
import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from kvmesh.cli.pool import NoViewError, fetch_view, main, picture
from kvmesh.cli.stack_state import hold_state, write_description
from kvmesh.core.types import WorkerId
from kvmesh.runtime.admin import AdminPort, showing
from kvmesh.runtime.admin_config import AdminConfig
from services.kvmanager.pool import Pool
from tests.unit.kvmanager.pool_stage import Stage
from tests.unit.policy.test_heat import SIZE, prefix

TOKEN = "a token that is long enough"


async def planned() -> Pool:
    """A pool whose last plan copied a prefix away from a busy worker."""
    stage = Stage()
    pool = stage.replica("one")
    seat = await stage.worker(pool, WorkerId("a"), "ab")
    await stage.worker(pool, WorkerId("b"))
    stage.report(seat, 80)
    for _ in range(10):
        pool.heat.note("m", prefix("ab"), 2 * SIZE)
    await stage.window(pool)
    return pool


async def asked(*flags: str, admin: AdminPort) -> tuple[int, str]:
    """What `kvmesh pool` prints for an open admin port."""
    await admin.start()
    try:
        out = io.StringIO()
        url = f"http://127.0.0.1:{admin.port}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout", out)
            code = await asyncio.to_thread(main, ["--admin-url", url, *flags])
        return code, out.getvalue()
    finally:
        await admin.close()


async def test_it_shows_prefixes_holders_and_orders(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    admin = AdminPort(AdminConfig(port=0, token=TOKEN))
    admin.route("GET", "/debug/segments", showing((await planned()).shown))
    code, text = await asked("--admin-token-file", str(token_file), admin=admin)
    assert code == 0
    assert "this replica plans" in text
    assert "overloaded_holder" in text
    assert prefix("ab")[-16:].hex()[:12] in text


async def test_programs_get_all_of_it() -> None:
    admin = AdminPort(AdminConfig(port=0))
    admin.route("GET", "/debug/segments", showing((await planned()).shown))
    _, text = await asked("--json", admin=admin)
    view = json.loads(text)
    assert [each["worker_id"] for each in view["workers"]] == ["a", "b"]
    assert view["orders"][0]["target"] == "b"


async def test_a_port_that_is_no_kvmanager_s() -> None:
    async def other(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"decisions": []})

    admin = AdminPort(AdminConfig(port=0))
    admin.route("GET", "/debug/segments", other)
    with pytest.raises(NoViewError, match="not the admin port of a kvmanager"):
        await asked(admin=admin)
    locked = AdminPort(AdminConfig(port=0, token=TOKEN))
    locked.route("GET", "/debug/segments", other)
    with pytest.raises(NoViewError, match="answers 401"):
        await asked(admin=locked)


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(NoViewError, match="refused"):
            fetch_view(url, "", 5.0)
    with pytest.raises(SystemExit) as caught:
        main(["--admin-url", url, "--admin-token-file", "/no/such/file"])
    assert caught.value.code == 2
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(NoViewError, match="no local stack runs"):
        main(["--state-dir", str(tmp_path)])
    with pytest.raises(NoViewError, match="is no URL"):
        main(["--admin-url", "http://[::1"])


async def test_the_local_stack_is_found_by_itself(tmp_path: Path) -> None:
    admin = AdminPort(AdminConfig(port=0))
    admin.route("GET", "/debug/segments", showing((await planned()).shown))
    await admin.start()
    try:
        with hold_state(tmp_path):
            write_description(tmp_path, {"pool": f"127.0.0.1:{admin.port}"})
            assert await asyncio.to_thread(main, ["--state-dir", str(tmp_path)]) == 0
    finally:
        await admin.close()


def test_a_worker_that_leaves_is_marked() -> None:
    view: dict[str, Any] = {
        "planning": False,
        "reads_cv": 0.5,
        "workers": [
            {
                "worker_id": "a",
                "cluster": "east",
                "role": "prefill",
                "read_blocks": 3.0,
                "room_blocks": 7,
                "leaving": True,
            }
        ],
        "segments": [{"prefix": "ab" * 16, "reads": 1.0, "num_blocks": 4, "holders": []}],
        "orders": [{"order": "evict_first", "prefix": "cd", "target": "a", "num_blocks": 2}],
    }
    console = Console(file=io.StringIO(), width=160)
    console.print(picture(view))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "another replica plans" in text
    assert "leaving" in text
    assert "evict_first" in text
