"""A real API server of Kubernetes with its etcd, where KUBEBUILDER_ASSETS names their folder."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kvmesh.core.config import environment
from tests.waiting import until

ASSETS = environment("KUBEBUILDER_ASSETS", "")
"""Folder with `etcd` and `kube-apiserver`, as Kubernetes' own tools name it."""


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def api_server(users: Mapping[str, str], folder: Path) -> AsyncIterator[tuple[str, Path]]:
    """A server with RBAC.

    Args:
        users: user names by token; `system:admin` is of the group `system:masters`.

    Yields:
        its URL and the file of its certificate.
    """
    client_port, peer_port, port = free_ports(3)
    store = f"http://127.0.0.1:{client_port}"
    key, tokens = _write_secrets(users, folder)
    etcd = [
        f"{ASSETS}/etcd",
        f"--data-dir={folder}/etcd",
        f"--listen-client-urls={store}",
        f"--advertise-client-urls={store}",
        f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
    ]
    server = [
        f"{ASSETS}/kube-apiserver",
        f"--etcd-servers={store}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={folder}/certificates",
        "--authorization-mode=RBAC",
        f"--token-auth-file={tokens}",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--service-account-issuer=https://kubernetes.default",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        # Nobody makes the accounts that this would ask for.
        "--disable-admission-plugins=ServiceAccount",
    ]
    with _running(etcd, folder / "etcd.log"), _running(server, folder / "api.log"):
        url, certificate = f"https://127.0.0.1:{port}", folder / "certificates" / "apiserver.crt"
        admin = next(token for token, user in users.items() if user == "system:admin")
        await until(lambda: _answers(url, admin, certificate), "the API server answers")
        yield url, certificate


def _write_secrets(users: Mapping[str, str], folder: Path) -> tuple[Path, Path]:
    """Writes a key for tokens of accounts, and the table of static tokens."""
    key, tokens = folder / "accounts.key", folder / "tokens.csv"
    private = rsa.generate_private_key(65537, 2048).private_bytes(
        Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    )
    key.write_bytes(private)
    groups = {"system:admin": "system:masters"}
    lines = [
        f'{token},{user},{number},"{groups.get(user, "system:serviceaccounts")}"\n'
        for number, (token, user) in enumerate(users.items())
    ]
    tokens.write_text("".join(lines))
    return key, tokens


async def _answers(url: str, token: str, certificate: Path) -> bool:
    await asyncio.sleep(0.1)
    headers = {"Authorization": f"Bearer {token}"}
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{url}/api/v1/namespaces/default", ssl=context) as answer,
        ):
            return answer.status == 200
    except (aiohttp.ClientError, OSError):  # the certificate is not made yet
        return False
