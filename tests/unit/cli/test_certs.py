from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
from cryptography import x509

from kvmesh.cli.__main__ import main
from kvmesh.cli.certs import issue, make_ca, read_ca, write
from kvmesh.core.errors import ConfigError
from kvmesh.rpc.channels import TlsConfig
from kvmesh.rpc.tls import client_context, server_context


def make(folder: Path, *flags: str) -> int:
    return main(["certs", "--out", str(folder), *flags])


def files(folder: Path, name: str, ca: Path | None = None) -> TlsConfig:
    return TlsConfig(
        str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str((ca or folder) / "ca.pem")
    )


def unasked(server: TlsConfig) -> ssl.SSLContext:
    """As `server_context`, for who does not ask it whether anybody would take the certificate."""
    with patch("kvmesh.rpc.tls.check_trust"):
        context = server_context(server, "test")
    assert context is not None
    return context


def greet(server: TlsConfig, client: TlsConfig, host: str = "127.0.0.1") -> bytes:
    """What a client hears over TLS from a server on a real socket; empty if it is turned away."""
    inside, outside = unasked(server), client_context(client, "test")
    assert outside is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            try:
                with inside.wrap_socket(sock, server_side=True) as wire:
                    wire.sendall(b"hello")
            except (ssl.SSLError, OSError):
                sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=10) as sock,
                outside.wrap_socket(sock, server_hostname=host) as wire,
            ):
                return wire.recv(5)
        except (ssl.SSLError, ConnectionResetError):
            return b""
        finally:
            thread.join()


def test_services_trust_each_other_and_strangers_stay_out(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    assert make(own) == make(other) == 0
    prefill = files(own, "prefill")
    assert greet(prefill, files(own, "decode")) == b"hello"
    assert greet(prefill, files(own, "decode"), "localhost") == b"hello"
    assert greet(prefill, files(own, "decode"), "example.org") == b""
    assert greet(prefill, files(other, "decode", ca=own)) == b""
    assert greet(prefill, files(other, "decode")) == b""
    assert greet(prefill, TlsConfig(ca=str(own / "ca.pem"))) == b""


def test_a_certificate_that_has_ended_opens_no_door_on_either_side(tmp_path: Path) -> None:
    make(tmp_path)
    ca = read_ca(tmp_path)
    assert ca is not None
    write(issue(ca, "prefill", ["127.0.0.1"], days=0), tmp_path, "prefill")
    ended, decode = files(tmp_path, "prefill"), files(tmp_path, "decode")
    with pytest.raises(ConfigError, match="certificate has expired"):
        server_context(ended, "test")
    assert greet(ended, decode) == b""
    assert greet(decode, ended) == b""
    assert greet(decode, files(tmp_path, "gateway")) == b"hello"


def test_the_public_certificate_opens_no_door_inside(tmp_path: Path) -> None:
    make(tmp_path)
    public = files(tmp_path, "public")
    assert greet(public, files(tmp_path, "decode")) == b"hello"
    assert greet(files(tmp_path, "prefill"), public) == b""


def test_keys_are_their_owners_alone_and_a_second_run_keeps_the_ca(tmp_path: Path) -> None:
    make(tmp_path)
    for key in tmp_path.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600, key
    ca, prefill = (tmp_path / "ca.pem").read_bytes(), files(tmp_path, "prefill")
    assert make(tmp_path, "--services", "prefill-1", "--hosts", "127.0.0.1") == 0
    assert (tmp_path / "ca.pem").read_bytes() == ca
    assert greet(prefill, files(tmp_path, "prefill-1")) == b"hello"


def test_what_cannot_be_used_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path)
    (tmp_path / "ca.key").write_bytes((tmp_path / "decode.key").read_bytes())
    assert make(tmp_path) == 1
    assert "not the key of" in capsys.readouterr().err
    (tmp_path / "ca.key").write_text("junk")
    assert make(tmp_path) == 1
    (tmp_path / "file").write_text("")
    assert make(tmp_path / "file") == 1


def test_an_authority_that_has_ended_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(make_ca(days=0), tmp_path, "ca")
    assert make(tmp_path) == 1
    assert "the CA expired on" in capsys.readouterr().err


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    make(tmp_path, "--days", "2")
    assert make(tmp_path, "--days", "30") == 0
    ca = read_ca(tmp_path)
    assert ca is not None
    cert = x509.load_pem_x509_certificate((tmp_path / "decode.pem").read_bytes())
    assert cert.not_valid_after_utc == ca.cert.not_valid_after_utc


@pytest.mark.parametrize(
    "wrong",
    [
        ("--services", "ca"),
        ("--services", ""),
        ("--services", "decode,../decode"),
        ("--hosts", " , "),
        ("--hosts", "knoten-ü.example"),
        ("--hosts", "node-1 node-2"),
        ("--days", "99999999"),
    ],
)
def test_what_no_certificate_can_be_made_of(wrong: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        make(tmp_path, *wrong)
    assert stop.value.code == 2
    assert not list(tmp_path.iterdir())
