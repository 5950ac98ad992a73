"""An engine on two hosts with networks of their own: their packets go over a link alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core.config import child_environment
from kvmesh.core.mesh_secret import new_secret
from tests.mesh_processes import MODEL_FOLDER
from tests.packet_link import FAR, NEAR, PacketLink, Weather, missing, packet_link
from tests.vllm.said_by import said_by

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PORT = 7003


def test_two_hosts_say_what_one_says(tmp_path: Path) -> None:
    one = said_by(1)
    with packet_link(Weather(delay_s=0.0002)) as link:
        two = said_by_hosts(link, tmp_path)
        assert link.weather.is_cut is False
    for name in ("greedy", "drawn", "chunked"):
        assert two[name] == one[name], name
    assert two["pool"] == pytest.approx(one["pool"], abs=1e-4)


def said_by_hosts(link: PacketLink, folder: Path) -> dict[str, Any]:
    """The leader is at the near end, and its other rank at the far one."""
    secret = folder / "secret"
    secret.write_text(new_secret())
    # Neither host's name is of an address that the other one reaches.
    environment = child_environment({"GLOO_SOCKET_IFNAME": "kv0", "OMP_NUM_THREADS": "1"})
    leading = ["-m", "tests.vllm.said_by", "2", "1", f"{NEAR}:{PORT}", str(secret)]
    following = [
        "-m",
        "services.ranks",
        f"--server.host={FAR}",
        f"--server.secret-file={secret}",
        f"--ranks.leader={NEAR}:{PORT}",
        f"--ranks.model={MODEL_FOLDER}",
    ]
    with link.far():
        host = subprocess.Popen([sys.executable, *following], env=environment)
    try:
        with link.near():
            leader = subprocess.Popen(
                [sys.executable, *leading], env=environment, stdout=subprocess.PIPE
            )
        said, _ = leader.communicate(timeout=240)
        assert leader.returncode == 0
        host.terminate()
        assert host.wait(30) == 0
    finally:
        for process in (host, leader):
            process.kill()
            process.wait()
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found
