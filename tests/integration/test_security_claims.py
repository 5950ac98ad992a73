"""What docs/security.md says of a gateway and no other test shows: limits included."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp

from kvmesh.cli.certs import main as make_certs
from kvmesh.policy.quota import TenantLimits
from kvmesh.rpc.channels import TlsConfig
from services.gateway.config import HttpConfig
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack
from tests.integration.test_gateway_tenants import ask, tenants, write_tenants


async def status_of(stack: Stack, key: str, path: str, body: dict[str, Any]) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(stack.url) as session,
        session.post(path, json=body, headers=headers) as answer,
    ):
        assert answer.status != 401 or "Retry-After" not in answer.headers
        return answer.status


async def test_an_answer_that_has_begun_outlives_its_key(tmp_path: Path) -> None:
    async with tenants(tmp_path, {"a": TenantLimits()}) as stack:
        stack.mesh.go.clear()  # decode waits behind its first token
        body = {"model": MODEL, "prompt": "one", "stream": True, "max_tokens": 4}
        async with (
            aiohttp.ClientSession(stack.url) as session,
            session.post(
                "/v1/completions", json=body, headers={"Authorization": "Bearer key-a"}
            ) as answer,
        ):
            assert answer.status == 200
            assert (await answer.content.readline()).startswith(b"data: {")
            await write_tenants(tmp_path / "tenants.json", {"b": TenantLimits()})
            nothing = {"model": "none"}  # never reaches a worker
            while await status_of(stack, "key-a", "/v1/completions", nothing) != 401:
                await asyncio.sleep(0)
            stack.mesh.go.set()
            rest = await answer.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in rest.replace(b" ", b"")
        assert (await ask(stack, "a"))[0] == 401


async def test_guesses_of_keys_are_neither_slowed_nor_held_against_anybody(tmp_path: Path) -> None:
    async with tenants(tmp_path, {"a": TenantLimits()}) as stack:
        for guess in range(30):
            key = f"guess-{guess}"
            assert await status_of(stack, key, "/v1/completions", {"model": MODEL}) == 401
        assert (await ask(stack, "a"))[0] == 200


def _outside(url: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests that ask the gateway to fetch something."""
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": url}}}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "file", "file": {"file_id": url}},
    ]
    told: list[dict[str, Any]] = [
        {"type": "input_image", "image_url": url},
        {"type": "input_file", "file_url": url},
    ]
    said = [{"messages": [{"role": "user", "content": [part]}]} for part in parts]
    return [
        *(("/v1/chat/completions", chat | each) for each in said),
        ("/v1/chat/completions", chat | {"response_format": schema}),
        *(
            ("/v1/responses", {"model": MODEL, "input": [{"role": "user", "content": [part]}]})
            for part in told
        ),
    ]


async def test_nothing_is_fetched_for_a_client(tmp_path: Path) -> None:
    came: list[object] = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer.get_extra_info("peername"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    secret = tmp_path / "secret.json"
    secret.write_text('{"const": "hunter2"}')
    port = server.sockets[0].getsockname()[1]
    async with server, gateway_stack(tmp_path) as stack:
        for url in (f"http://127.0.0.1:{port}/x", secret.as_uri()):
            for path, body in _outside(url):
                assert await status_of(stack, "", path, body) == 400, (path, body)
        assert stack.mesh.workers["p1"].specs == []
        await stack.idle()
    assert came == []


async def _shown(stack: Stack, context: ssl.SSLContext) -> bytes | None:
    """The certificate that the HTTP port shows."""
    _, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port, ssl=context)
    shown: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return shown


async def test_a_certificate_is_the_one_of_the_start(tmp_path: Path) -> None:
    assert make_certs(["--out", str(tmp_path)]) == 0
    public = tmp_path / "public.pem"
    tls = TlsConfig(str(public), str(tmp_path / "public.key"))
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    first = ssl.PEM_cert_to_DER_cert(public.read_text())
    async with gateway_stack(tmp_path, http=HttpConfig(port=0, tls=tls)) as stack:
        assert await _shown(stack, trusted) == first
        assert make_certs(["--out", str(tmp_path)]) == 0  # of the same CA
        assert ssl.PEM_cert_to_DER_cert(public.read_text()) != first
        assert await _shown(stack, trusted) == first


async def test_salts_of_a_client_leave_no_tenant_and_set_users_apart(tmp_path: Path) -> None:
    """No hash that one caller's request asks the index for is one that another's has left."""
    callers = [("a", ""), ("a", "b"), ("a", "1:b:"), ("ab", ""), ("b", ""), ("b", "1:a:")]
    async with tenants(tmp_path, {name: TenantLimits() for name, _ in callers}) as stack:
        prompt = "one request, one handoff " * 20
        for tenant, salt in [*callers, callers[1]]:
            fields = {"cache_salt": salt} if salt else {}
            assert (await ask(stack, tenant, prompt=prompt, **fields))[0] == 200
        *hashes, again = (query.block_hashes for query in stack.mesh.queries)
        assert again == hashes[1]
        assert len(again) > 1
        assert len(set().union(*hashes)) == len(hashes) * len(again)
