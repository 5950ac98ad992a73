"""The scripts in docker-compose.yml that make the secrets and start Redis, run for real."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import redis
from redis.exceptions import AuthenticationError

from kvmesh.cli.probes import free_ports
from kvmesh.core.mesh_secret import load_secret
from kvmesh.metadata.server_binary import find_redis_binary
from tests.unit.packaging.compose_file import compose_services, kvmesh_services
from tests.waiting import until

WAITS = "sleep infinity & wait"
"""How the service that makes the secrets stays, after it has made them."""

USE_REDIS = ("gateway", "gateway-1", "scheduler", "kvmanager")


def script(name: str, folder: Path) -> list[str]:
    """The command of a service, with its folders below `folder`."""
    service = compose_services()[name]
    (text,) = service["command"]
    text = text.replace("$$", "$").replace("/tmp", str(folder)).replace("/secrets/", f"{folder}/")
    return [*service["entrypoint"], text]


def made(folder: Path) -> dict[str, str]:
    for name in ("mesh", "redis"):
        (folder / name).mkdir(exist_ok=True)
    command = script("secrets", folder)
    assert command[-1].count(WAITS) == 1
    command[-1] = command[-1].replace(WAITS, "")
    subprocess.run(command, check=True, timeout=30)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in files)  # services are other users
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_secrets_are_made_once(tmp_path: Path) -> None:
    first = made(tmp_path)
    assert set(first) == {"mesh/secret", "redis/password"}
    assert len(set(first.values())) == 2
    assert all(len(each) == 64 for each in first.values())
    assert load_secret(str(tmp_path / "mesh/secret")) is not None
    assert made(tmp_path) == first


def start_redis(folder: Path, port: int) -> subprocess.Popen[bytes]:
    command = script("redis", folder)
    command[-1] = command[-1].rstrip() + f" --port {port} --bind 127.0.0.1\n"
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.Popen(command, env={"PATH": path}, stdout=subprocess.DEVNULL)


async def test_redis_starts_with_the_password(tmp_path: Path) -> None:
    password = made(tmp_path)["redis/password"]
    binary = find_redis_binary()
    assert binary is not None
    (tmp_path / "redis-server").symlink_to(binary)
    [port] = free_ports("127.0.0.1", 1)
    process = start_redis(tmp_path, port)
    try:
        stranger = redis.Redis(port=port)

        def refuses() -> bool:
            try:
                stranger.ping()
            except AuthenticationError:
                return True
            except redis.ConnectionError:
                return False
            raise AssertionError("it answers anybody")

        await until(refuses, "Redis wants a password")
        stranger.close()
        with redis.Redis(port=port, password=password) as member:
            assert member.ping()
        words = psutil.Process(process.pid).cmdline()
        assert password not in " ".join(words)
        assert "sh" not in words  # the shell has made room for Redis: signals reach it
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_every_service_has_the_secrets_that_it_needs_and_no_others() -> None:
    for name, service in kvmesh_services().items():
        mounted = {volume.split(":")[0] for volume in service["volumes"]}
        environment: dict[str, Any] = service["environment"]
        assert environment["KVMESH_SERVER__SECRET_FILE"] == "/secrets/mesh/secret"
        assert "mesh-secret" in mounted
        assert ("redis-password" in mounted) is (name in USE_REDIS)
        assert ("KVMESH_REDIS__PASSWORD_FILE" in environment) is (name in USE_REDIS)
    assert compose_services()["redis"]["volumes"] == ["redis-password:/secrets/redis:ro"]
