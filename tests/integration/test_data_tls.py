"""Who may be at the other end of a data channel: by the name in the certificate, both ways."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvmesh.cli.certs import main as make_certs
from kvmesh.core.errors import LostError
from kvmesh.rpc.channels import PeerTls
from kvmesh.rpc.tls import client_context, server_context
from kvmesh.transfer.tls import DataTls, TlsWire, WrongPeerError, accept_tls, connect_tls

WORKERS = frozenset({"prefill", "decode"})
ANYBODY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Certificates:
    """A CA's certificates by service."""

    folder: Path

    def connecting(self, service: str, peers: frozenset[str]) -> DataTls:
        return DataTls(_known(client_context(self._files(service), "test")), peers)

    def accepting(self, service: str, peers: frozenset[str]) -> DataTls:
        return DataTls(_known(server_context(self._files(service), "test")), peers)

    def _files(self, service: str) -> PeerTls:
        pem, key = self.folder / f"{service}.pem", self.folder / f"{service}.key"
        return PeerTls(str(pem), str(key), str(self.folder / "ca.pem"))


def _known(context: ssl.SSLContext | None) -> ssl.SSLContext:
    assert context is not None
    return context


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    assert make_certs(["--out", str(folder), "--hosts", "127.0.0.1"]) == 0
    return Certificates(folder)


@contextlib.contextmanager
def _sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        one.setblocking(False)
        two.setblocking(False)
        yield one, two


End = TlsWire | BaseException


async def _greet(connecting: DataTls, accepting: DataTls) -> tuple[End, End]:
    with _sockets() as (one, two):
        return await asyncio.gather(
            connect_tls(one, connecting, "127.0.0.1"),
            accept_tls(two, accepting),
            return_exceptions=True,
        )


async def test_workers_greet_each_other(certificates: Certificates) -> None:
    client, server = await _greet(
        certificates.connecting("prefill", WORKERS), certificates.accepting("decode", WORKERS)
    )
    assert isinstance(client, TlsWire)
    assert isinstance(server, TlsWire)
    assert (client.peer_name(), server.peer_name()) == ("decode", "prefill")


async def test_a_certificate_for_the_mesh_is_good_at_any_address(tmp_path: Path) -> None:
    assert make_certs(["--out", str(tmp_path), "--hosts", "mesh.example"]) == 0
    own = Certificates(tmp_path)
    accepting = own.accepting("decode", WORKERS)
    by_address = own.connecting("prefill", WORKERS)
    with _sockets() as (one, two):
        server = asyncio.create_task(accept_tls(two, accepting))
        with pytest.raises(LostError):
            await connect_tls(one, by_address, "127.0.0.1")
        one.close()
        await asyncio.wait([server])
        assert isinstance(server.exception(), LostError)
    ends = await _greet(replace(by_address, peer_name="mesh.example"), accepting)
    assert all(isinstance(end, TlsWire) for end in ends)


async def test_another_service_of_the_mesh_may_not_write(certificates: Certificates) -> None:
    _, server = await _greet(
        certificates.connecting("gateway", ANYBODY), certificates.accepting("decode", WORKERS)
    )
    assert isinstance(server, WrongPeerError)
    assert "gateway is no peer" in str(server)


async def test_another_service_of_the_mesh_is_given_no_kv(certificates: Certificates) -> None:
    client, _ = await _greet(
        certificates.connecting("prefill", WORKERS), certificates.accepting("scheduler", ANYBODY)
    )
    assert isinstance(client, LostError)
    assert "scheduler is no peer" in str(client)


async def test_without_names_every_certificate_of_the_ca_is_good(
    certificates: Certificates,
) -> None:
    ends = await _greet(
        certificates.connecting("gateway", ANYBODY), certificates.accepting("decode", ANYBODY)
    )
    assert all(isinstance(end, TlsWire) for end in ends)
