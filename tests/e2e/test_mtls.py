"""A mesh of real processes in which everything between services is mTLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.cli.certs import SERVICES
from kvmesh.cli.certs import main as make_certs
from kvmesh.cli.health import SERVING, HealthTls, check_health
from kvmesh.metadata.tenants import digest_of
from kvmesh.policy.quota import TenantLimits
from kvmesh.rpc.channels import MeshAccess, PeerTls
from kvmesh.rpc.fleet import FleetWatch
from kvmesh.rpc.tls import client_context
from tests.integration.test_gateway_tenants import write_tenants
from tests.mesh_processes import MODEL, Mesh, fake_tokens, running_mesh
from tests.waiting import until

PROMPT = list(range(100, 185))  # five full blocks and a rest
ADMIN_TOKEN = "the-token-of-the-operators"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

_WORKERS = ("prefill", "decode")
_READS = [f"{name}:{rpc}" for name in _WORKERS for rpc in ("LeaseBlocks", "ReleaseBlocks")]
_JOINS = [f"{name}:RegisterWorker" for name in _WORKERS]
CALLERS = {
    "scheduler": ["gateway:Route", "gateway:WatchFleet", *_JOINS],
    "kvmanager": [
        "scheduler:WatchPrefixes",
        "scheduler:MatchPrefix",
        *(f"{name}:Publish" for name in _WORKERS),
    ],
    "prefill": ["gateway", *_READS],
    "decode": ["gateway", *_READS],
}
"""What each service is asked for, and by whom: as in docs/security.md."""

Flags = dict[str, dict[str, object]]


def mtls_flags(folder: Path) -> Flags:
    """Flags that give every service its own certificate, on all its channels."""
    assert make_certs(["--out", str(folder)]) == 0
    flags: Flags = {}
    for name in SERVICES:
        files = {
            "cert": folder / f"{name}.pem",
            "key": folder / f"{name}.key",
            "ca": folder / "ca.pem",
        }
        flags[name] = {f"server.tls.{part}": path for part, path in files.items()}
        if name in CALLERS:
            flags[name]["server.callers"] = ",".join(CALLERS[name])
        if name in ("prefill", "decode"):
            flags[name] |= {f"data.tls.{part}": path for part, path in files.items()}
            flags[name]["worker.channels"] = "tcp"
            flags[name]["data.peers"] = "prefill,decode"
    return flags


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    flags = mtls_flags(tmp_path / "certs")
    token = tmp_path / "admin.token"
    token.write_text(ADMIN_TOKEN)
    tenants = await write_tenants(
        tmp_path / "tenants.json", {"acme": TenantLimits(), "beta": TenantLimits()}
    )
    flags["gateway"] |= {
        "access.tenants-file": tenants.tenants_file,
        "server.admin.port": 0,
        "server.admin.token-file": token,
        "telemetry.log.level": "debug",
    }
    async with running_mesh(tmp_path, 1, 1, flags=flags) as running:
        yield running


async def ask(mesh: Mesh, key: str = "key-acme", **fields: str) -> tuple[int, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 20,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(mesh.url) as session,
        session.post("/v1/completions", json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


def cached(outcome: tuple[int, Any]) -> int:
    status, answer = outcome
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_requests_are_served_strangers_stay_out_and_no_secret_is_logged(
    mesh: Mesh, tmp_path: Path
) -> None:
    status, answer = await ask(mesh)
    assert status == 200, answer
    assert answer["choices"][0]["token_ids"] == fake_tokens(PROMPT, 20)
    # Workers and index know the prefix by now, but of this tenant alone.
    assert [cached(await ask(mesh, key)) for key in ("key-beta", "key-acme")] == [0, 80]
    for key, salt, known in (
        *(("key-beta", "4:acme:", 0), ("key-acme", "user", 0)),
        *(("key-acme", "user", 80), ("key-acme", "", 80)),
    ):
        assert cached(await ask(mesh, key, cache_salt=salt)) == known, (key, salt)
    links = await mesh["decode-0"].metrics()
    assert links.value("kvmesh_link_bytes_total", channel="tcp") > 0  # the KV went over TLS

    await check_strangers(mesh, tmp_path)
    assert (await ask(mesh, "key-of-nobody"))[0] == 401
    admin = f"http://{mesh['gateway'].address_of('admin_serving')}/debug/config"
    async with aiohttp.ClientSession() as session:
        for header, expected in ((ADMIN_TOKEN, 200), ("wrong-token-of-nobody", 401)):
            async with session.get(admin, headers={"Authorization": f"Bearer {header}"}) as page:
                assert page.status == expected
                assert ADMIN_TOKEN not in await page.text()
    await mesh.idle()
    check_logs(mesh)


async def check_strangers(mesh: Mesh, folder: Path) -> None:
    other = folder / "other"
    assert make_certs(["--out", str(other), "--services", "decode,public"]) == 0
    own = folder / "certs"
    trusted = HealthTls(str(own / "ca.pem"), str(own / "decode.pem"), str(own / "decode.key"))
    strangers = {
        "plain text": HealthTls(),
        "no certificate": HealthTls(str(own / "ca.pem")),
        "another CA": HealthTls(
            str(own / "ca.pem"), str(other / "decode.pem"), str(other / "decode.key")
        ),
    }
    asked = [(child, who) for child in mesh.children.values() for who in strangers]
    answers = await asyncio.gather(
        *(health(child.address, strangers[who]) for child, who in asked),
        *(health(child.address, trusted) for child in mesh.children.values()),
    )
    let_in = [
        (child.name, who)
        for (child, who), answer in zip(asked, answers, strict=False)
        if answer == SERVING
    ]
    assert let_in == []
    assert answers[len(asked) :] == [SERVING] * len(mesh.children)
    gateway = PeerTls(str(own / "gateway.pem"), str(own / "gateway.key"), str(own / "ca.pem"))
    for port in await data_ports(mesh, gateway):
        assert not await greeted(port, None)
        for tls in (
            PeerTls(ca=trusted.ca),
            PeerTls(str(other / "decode.pem"), str(other / "decode.key"), trusted.ca),
        ):
            assert not await greeted(port, client_context(tls, "test"))


async def data_ports(mesh: Mesh, tls: PeerTls) -> list[int]:
    access = MeshAccess(tls, mesh.access.secret)  # as the gateway, which may call it
    watch = FleetWatch([mesh["scheduler"].address], access)
    task = asyncio.create_task(watch.run())
    await until(lambda: len(watch.workers) == 2, "two workers are seen over mTLS")
    task.cancel()
    await asyncio.wait({task})
    return [worker.info.data_endpoint.port for worker in watch.workers]


async def greeted(port: int, tls: ssl.SSLContext | None) -> bool:
    """Whether a data port has anything to say to somebody without a certificate of the mesh."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        writer.write(bytes(64))
        said = await reader.read(1)
        writer.close()
    except (ConnectionError, ssl.SSLError):
        return False
    # A TLS alert (0x15) is a goodbye, not a greeting.
    return said not in (b"", b"\x15")


async def health(address: str, tls: HealthTls) -> str:
    return await asyncio.to_thread(check_health, address, 2.0, tls)


def check_logs(mesh: Mesh) -> None:
    """No key, token, password or private key in any log or trace."""
    secrets = ["key-acme", "key-of-nobody", ADMIN_TOKEN, digest_of("key-acme"), "PRIVATE KEY"]
    files = [*mesh.folder.glob("*.log"), *mesh.trace_files]
    assert len(files) >= 10
    for file in files:
        text = file.read_text(errors="replace")
        assert not [secret for secret in secrets if secret in text], file.name
