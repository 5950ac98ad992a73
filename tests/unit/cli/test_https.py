"""Commands before a server whose CA this machine does not know."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvmesh.cli.bench_load import find_model
from kvmesh.cli.certs import main as certs
from kvmesh.cli.findings import Level
from kvmesh.cli.https import trust
from kvmesh.cli.pool import NoViewError, fetch_view
from kvmesh.cli.stack_checks import check_gateway
from kvmesh.core.errors import ConfigError, KvMeshError

BODY = b'{"data": [{"id": "tiny"}], "segments": []}'
HEAD = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certs")
    assert certs(["--out", str(made), "--hosts", "127.0.0.1", "--services", "public"]) == 0
    return made


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD.encode() + BODY)
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "public.pem", folder / "public.key")
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_named_ca_is_trusted(folder: Path) -> None:
    ca = str(folder / "ca.pem")
    async with serving(folder) as url:
        assert await find_model(url, tls_ca=ca) == "tiny"
        assert (await check_gateway(url, trust(ca))).level is Level.OK
        assert "segments" in await asyncio.to_thread(fetch_view, url, "", 5.0, trust(ca))


async def test_without_it_the_message_names_the_flag(folder: Path) -> None:
    async with serving(folder) as url:
        with pytest.raises(KvMeshError, match="--tls-ca"):
            await find_model(url)
        finding = await check_gateway(url, trust(""))
        assert finding.level is Level.FAIL
        assert "--tls-ca" in finding.remedy
        with pytest.raises(NoViewError, match="--tls-ca"):
            await asyncio.to_thread(fetch_view, url, "", 5.0, trust(""))


async def test_a_gateway_that_is_not_there_is_another_matter() -> None:
    finding = await check_gateway("https://127.0.0.1:1", trust(""))
    assert finding.level is Level.FAIL
    assert "start it" in finding.remedy


def test_a_file_that_is_none(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tls-ca .*nowhere: No such file"):
        trust(str(folder / "nowhere"))
    with pytest.raises(ConfigError, match="no certificate in it"):
        trust(str(folder / "ca.key"))
