from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvmesh.cli.health import check_health, main
from kvmesh.core.errors import ConfigError

Status = health_pb2.HealthCheckResponse


@pytest.fixture
async def servicer() -> health.aio.HealthServicer:
    return health.aio.HealthServicer()


@pytest.fixture
async def target(servicer: health.aio.HealthServicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=0)


@pytest.mark.parametrize(
    ("status", "word", "code"),
    [
        (Status.SERVING, "SERVING", 0),
        (Status.NOT_SERVING, "NOT_SERVING", 1),
        (Status.UNKNOWN, "UNKNOWN", 1),
    ],
)
async def test_states(
    servicer: health.aio.HealthServicer,
    target: str,
    status: Any,
    word: str,
    code: int,
) -> None:
    await servicer.set("", status)
    assert await asyncio.to_thread(check_health, target, 20.0) == word
    assert await asyncio.to_thread(main, [target, "--timeout", "20"]) == code


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # ours, but not listening: connections are refused
        assert main([f"127.0.0.1:{bound.getsockname()[1]}"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_an_address_without_a_port_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["scheduler"])
    assert caught.value.code == 2
    assert "'scheduler' is not HOST:PORT" in capsys.readouterr().err


def test_a_file_that_is_no_authority_is_said(tmp_path: Path) -> None:
    junk = tmp_path / "ca.pem"
    junk.write_text("junk")
    with pytest.raises(ConfigError, match="no certificate in it"):
        main(["127.0.0.1:1", "--tls-ca", str(junk)])
