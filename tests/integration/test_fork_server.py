"""Services that begin with their modules loaded behave like those that load them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.fork_server import fork_server
from tests.mesh_child import Child


def state_of(pid: int) -> dict[str, str]:
    """What the kernel says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def ignored(pid: int) -> bool:
    """Whether it does not hear of an interrupt."""
    return bool(int(state_of(pid)["SigIgn"], 16) >> (signal.SIGINT - 1) & 1)


def test_a_bad_flag_ends_both_alike(tmp_path: Path) -> None:
    children = [
        Child(
            f"forked-{is_forked}", "kvmanager", {"nobody.knows": 1}, tmp_path, is_forked=is_forked
        )
        for is_forked in (True, False)
    ]
    codes = []
    for child in children:
        child.start()
        assert child.process is not None
        codes.append(child.process.wait())
    assert codes[0] == codes[1] == 2
    forked, plain = (child.log_path.read_text() for child in children)
    assert forked == plain
    assert "unrecognized arguments: --nobody.knows=1" in forked


async def test_signals_arrive_and_ends_are_told(tmp_path: Path) -> None:
    alone: dict[str, object] = {
        "worker.scheduler-targets": "",
        "worker.kvmanager-target": "",
        "engine.kind": "fake",
    }
    first, second = (
        Child(name, "prefill", alone, tmp_path, is_forked=True) for name in ("first", "second")
    )
    first.start()
    second.start()
    await first.ready()
    await second.ready()
    assert first.address != second.address
    assert first.process is not None
    server = int(state_of(first.process.pid)["PPid"])
    assert server == fork_server().pid
    assert state_of(server)["Threads"] == "1", "a fork would have locks that nobody frees"
    os.kill(server, signal.SIGINT)
    assert ignored(server)
    assert not ignored(first.process.pid)
    first.kill()
    assert not first.running
    assert second.running
    second.signal(signal.SIGTERM)
    assert await second.exit_code() == 0
    assert first.process.wait() == -signal.SIGKILL
