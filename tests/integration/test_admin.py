"""The admin port of a service: who may ask, what is there, and what a service adds."""

from __future__ import annotations

import base64
import json
import logging
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kvmesh.cli.certs import main as make_certs
from kvmesh.core.config import option
from kvmesh.core.errors import ConfigError
from kvmesh.rpc.channels import TlsConfig
from kvmesh.runtime.admin import AdminPort, sent_token
from kvmesh.runtime.admin_config import AdminConfig
from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from kvmesh.telemetry.config import TelemetryConfig

TOKEN = "a-token-of-the-operators"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def basic(name: str) -> dict[str, str]:
    """The header that a browser sends after it asked for name and password."""
    pair = base64.b64encode(f"{name}:{TOKEN}".encode()).decode()
    return {"Authorization": f"Basic {pair}"}


@dataclass(frozen=True, slots=True)
class Config:
    """A service without work."""

    server: ServerConfig = field(default_factory=ServerConfig)
    telemetry: TelemetryConfig = option(TelemetryConfig, "")


async def build(config: Config, context: ServiceContext) -> None:
    async def decisions(request: web.Request) -> web.StreamResponse:
        return web.json_response({"of": request.match_info["request_id"]})

    async def front_page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="hello")

    context.admin.route("GET", "/debug/decisions/{request_id}", decisions)
    context.admin.route("GET", "/", front_page, needs_token=False)


@asynccontextmanager
async def admin(
    token: str = TOKEN,
) -> AsyncIterator[tuple[aiohttp.ClientSession, ServiceContext]]:
    config = Config(server=ServerConfig(admin=AdminConfig(port=0, token=token)))
    async with serving("test", config, build) as context:
        url = f"http://127.0.0.1:{context.admin.port}"
        async with aiohttp.ClientSession(url) as session:
            yield session, context


@pytest.fixture
def root_level() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = root.level
    yield root
    root.setLevel(before)


async def test_every_route_but_open_ones_needs_the_token() -> None:
    async with admin() as (session, _):
        for path in ("/metrics", "/debug/config", "/debug/tasks", "/debug/decisions/r1", "/none"):
            async with session.get(path) as answer:
                assert answer.status == 401, path
                assert answer.headers["WWW-Authenticate"].startswith("Basic")
            async with session.get(path, headers={"Authorization": "Bearer wrong"}) as answer:
                assert answer.status == 401, path
        for path, status in (("/", 200), ("/health", 200), ("/debug/decisions/r1", 401)):
            async with session.get(path) as answer:
                assert answer.status == status


async def test_the_token_opens_what_the_service_added() -> None:
    async with admin() as (session, _):
        async with session.get("/debug/decisions/r1", headers=BEARER) as answer:
            assert await answer.json() == {"of": "r1"}
        async with session.get("/debug/decisions/r1", headers=basic("anybody")) as answer:
            assert answer.status == 200
        async with session.get("/none", headers=BEARER) as answer:
            assert answer.status == 404


async def test_metrics_config_and_tasks_are_there_without_secrets() -> None:
    async with admin() as (session, _):
        async with session.get("/metrics", headers=BEARER) as answer:
            assert "process_cpu_seconds_total" in await answer.text()
        async with session.get("/debug/config", headers=BEARER) as answer:
            text = await answer.text()
            assert "server.admin.token = ***" in text
            assert TOKEN not in text
        async with session.get("/debug/tasks", headers=BEARER) as answer:
            assert all(set(task) == {"name", "at"} for task in await answer.json())


async def test_the_log_level_can_be_changed_while_the_service_runs(
    root_level: logging.Logger,
) -> None:
    async with admin() as (session, _):
        for body, status in (
            (b'{"level": "debug"}', 200),
            (b'{"level": "loud"}', 400),
            (b"{}", 400),
            (b"[1]", 400),
            (b"{", 400),
            (b"[" * 5000, 400),
        ):
            async with session.post("/admin/log-level", data=body, headers=BEARER) as answer:
                assert answer.status == status, body[:20]
        assert root_level.level == logging.DEBUG


async def test_a_drain_can_be_asked_for() -> None:
    async with admin() as (session, context):
        async with session.post("/admin/drain") as answer:
            assert answer.status == 401
        assert not context.stop.is_set()
        async with session.post("/admin/drain", headers=BEARER) as answer:
            assert answer.status == 202
        assert context.stop.is_set()


async def test_a_page_of_another_site_cannot_act() -> None:
    async with admin() as (session, context):
        foreign = {**basic("x"), "Origin": "http://evil.example"}
        async with session.post("/admin/drain", headers=foreign) as answer:
            assert answer.status == 403
        assert not context.stop.is_set()
        for senseless in (
            "http://[",
            "null",
            f"http://127.0.0.1:{context.admin.port}.evil.example",
        ):
            headers = {**basic("x"), "Origin": senseless}
            async with session.post("/admin/drain", headers=headers) as answer:
                assert answer.status == 403, senseless
        assert not context.stop.is_set()
        own = {**basic("x"), "Origin": f"http://127.0.0.1:{context.admin.port}"}
        async with session.post("/admin/drain", headers=own) as answer:
            assert answer.status == 202


async def test_without_a_token_this_host_may_read_and_nobody_may_act() -> None:
    async with admin(token="") as (session, context):
        async with session.get("/debug/config") as answer:
            assert answer.status == 200
        for host in ("evil.example", "[", "localhost.evil.example", "evil@[::1"):
            async with session.get("/debug/config", headers={"Host": host}) as answer:
                assert answer.status == 403, host
        async with session.post("/admin/drain") as answer:
            assert answer.status == 403
            assert "token" in json.dumps(await answer.json())
        assert not context.stop.is_set()


async def test_the_port_is_closed_unless_turned_on() -> None:
    async with serving("test", Config(), build) as context:
        assert context.admin.port == -1


async def test_the_port_can_be_tls(tmp_path: Path) -> None:
    assert make_certs(["--out", str(tmp_path)]) == 0
    tls = TlsConfig(str(tmp_path / "public.pem"), str(tmp_path / "public.key"))
    config = Config(server=ServerConfig(admin=AdminConfig(port=0, token=TOKEN, tls=tls)))
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with serving("test", config, build) as context, aiohttp.ClientSession() as session:
        address = f"127.0.0.1:{context.admin.port}/debug/config"
        async with session.get(f"https://{address}", headers=BEARER, ssl=trusted) as answer:
            assert answer.status == 200
            assert answer.headers["Server"] == "kvmesh"
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://{address}", headers=BEARER)


def test_a_token_is_demanded_where_others_can_reach_the_port() -> None:
    with pytest.raises(ConfigError, match=r"server\.admin\.token_file"):
        AdminPort(AdminConfig(host="0.0.0.0", port=0))
    AdminPort(AdminConfig(host="0.0.0.0", port=-1))
    with pytest.raises(ConfigError, match="at least 16"):
        AdminPort(AdminConfig(token="short"))


def test_the_token_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match="No such file"):
        AdminPort(AdminConfig(token_file=str(file)))
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        AdminPort(AdminConfig(token_file=str(file)))
    file.write_text("")
    with pytest.raises(ConfigError, match="at least 16"):
        AdminPort(AdminConfig(token_file=str(file)))
    file.write_text(TOKEN + "\n")
    AdminPort(AdminConfig(host="0.0.0.0", port=0, token_file=str(file)))


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic " + base64.b64encode(b"me:a:bc").decode(), "a:bc"),
        ("Basic !!", ""),
        ("Basic /w==", ""),
        ("Digest abc", ""),
        ("", ""),
    ],
)
def test_sent_token(header: str, token: str) -> None:
    assert sent_token(header) == token


async def test_a_socket_serves_its_owner_without_a_token(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    config = Config(server=ServerConfig(admin=AdminConfig(socket=str(path), token=TOKEN)))
    connector = aiohttp.UnixConnector(str(path))
    async with (
        serving("test", config, build) as context,
        aiohttp.ClientSession("http://anything", connector=connector) as session,
    ):
        assert context.admin.port == -1
        assert path.stat().st_mode & 0o777 == 0o600
        async with session.get("/debug/decisions/r1") as answer:
            assert await answer.json() == {"of": "r1"}
        async with session.post("/admin/log-level", json={"level": "loud"}) as answer:
            assert answer.status == 400
        async with session.post("/admin/drain") as answer:
            assert answer.status == 202
        assert context.stop.is_set()


@pytest.mark.parametrize(
    ("folder", "reason"), [("nowhere", "No such file"), (100 * "long", "path too long")]
)
async def test_a_socket_that_cannot_be_made_is_a_config_error(
    folder: str, reason: str, tmp_path: Path
) -> None:
    admin = AdminConfig(socket=str(tmp_path / folder / "admin.sock"))
    with pytest.raises(ConfigError, match=rf"server\.admin\.socket .*: .*{reason}"):
        async with serving("test", Config(server=ServerConfig(admin=admin)), build):
            pass
