from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.rpc.channels import TlsConfig, bind_server
from kvmesh.rpc.tls import client_context, server_context


def test_without_files_it_is_plain_text() -> None:
    assert server_context(TlsConfig(), "x.tls") is None
    assert client_context(TlsConfig(), "x.tls") is None


def test_half_a_configuration_is_not_plain_text_by_accident() -> None:
    with pytest.raises(ConfigError, match=r"x\.tls\.cert is empty"):
        server_context(TlsConfig(key="k.pem"), "x.tls")
    with pytest.raises(ConfigError, match=r"x\.tls\.cert is empty"):
        server_context(TlsConfig(ca="ca.pem"), "x.tls")


def test_a_file_that_cannot_be_used_names_the_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^x\.tls\.cert: .*No such file"):
        server_context(TlsConfig(cert=str(tmp_path / "none.pem")), "x.tls")
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"^x\.tls\.ca: "):
        client_context(TlsConfig(ca=str(junk)), "x.tls")


async def test_a_server_with_a_wrong_file_does_not_blame_its_port(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"^server\.tls\.cert: .*junk\.pem"):
        bind_server(grpc.aio.server(), "127.0.0.1", 0, TlsConfig(str(junk), str(junk)))
