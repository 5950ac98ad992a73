from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.cli import scheduler_access
from kvmesh.cli.probes import free_ports
from kvmesh.cli.scheduler_access import (
    NoAnswerError,
    SchedulerAccess,
    live_fleet,
)
from kvmesh.cli.scheduler_access import (
    scheduler_access as read_flags,
)
from kvmesh.cli.scheduler_flags import add_scheduler_flags
from kvmesh.core.errors import ConfigError
from kvmesh.rpc.channels import MeshAccess


async def test_a_scheduler_that_is_not_there_is_not_waited_for_as_long_as_an_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [port] = free_ports("127.0.0.1", 1)
    monkeypatch.setattr(scheduler_access, "FIRST_ANSWER_S", 0.2)
    access = SchedulerAccess((f"127.0.0.1:{port}",), MeshAccess(), timeout_s=3600.0)
    with pytest.raises(NoAnswerError, match=f"no scheduler answers at 127.0.0.1:{port}"):
        async with live_fleet(access, "test"):
            pass


_LOGS_WHILE_WATCHING = """\
import asyncio, contextlib, logging
from kvmesh.cli.scheduler_access import NoAnswerError, SchedulerAccess, live_fleet
from kvmesh.rpc.channels import MeshAccess

async def watch():
    with contextlib.suppress(NoAnswerError):
        async with live_fleet(SchedulerAccess(("127.0.0.1:9",), MeshAccess(), 0.1), "test"):
            pass

asyncio.run(watch())
logging.getLogger("kvmesh.rpc.fleet").warning("scheduler_unreachable")
"""


def test_what_the_watch_logs_is_not_printed_beside_what_commands_say() -> None:
    command = [sys.executable, "-c", _LOGS_WHILE_WATCHING]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_file_of_tls_that_is_none_is_said_before_anybody_is_asked(tmp_path: Path) -> None:
    junk = tmp_path / "ca.pem"
    junk.write_text("junk")
    parser = argparse.ArgumentParser()
    add_scheduler_flags(parser, 1.0)
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        read_flags(parser.parse_args(["--tls-ca", str(junk)]))
