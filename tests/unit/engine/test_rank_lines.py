"""Lines between the hosts of an engine: who may open one, and what strangers get."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvmesh.cli.certs import main as make_certs
from kvmesh.core.errors import ConfigError, LostError
from kvmesh.core.mesh_secret import MeshSecret, new_secret
from kvmesh.engine import rank_lines
from kvmesh.engine.rank_lines import (
    LOSS_S,
    LineKind,
    RankAccess,
    RankGate,
    RefusedLineError,
    dial,
)
from kvmesh.engine.vllm_messages import encoded, receive
from kvmesh.rpc.channels import PeerTls
from kvmesh.rpc.tls import client_context, server_context
from kvmesh.transfer.tls import DataTls
from tests.waiting import until

HOST = "127.0.0.1"
SECRET = RankAccess(secret=MeshSecret(new_secret()))
OPEN = RankAccess()


@contextmanager
def gate_of(access: RankAccess) -> Iterator[RankGate]:
    """Three hosts of two ranks each."""
    with closing(RankGate(HOST, 0, access, num_hosts=3, host_ranks=2, told={"x": 1})) as gate:
        yield gate


@pytest.mark.parametrize("access", [SECRET, OPEN])
def test_a_line_arrives_where_it_is_awaited(access: RankAccess) -> None:
    with gate_of(access) as gate:
        for kind, number, told in [
            (LineKind.HOST, 2, {"ranks": [4, 5], "x": 1}),
            (LineKind.STEPS, 2, {}),
            (LineKind.COPIES, 5, {}),
        ]:
            ours, answer = dial(HOST, gate.port, access, kind, number)
            theirs = gate.take(kind, number, 5.0)
            assert theirs is not None
            with ours, theirs:
                assert answer.items() >= told.items()
                theirs.sendall(encoded({"step": 1}))
                assert receive(ours) == {"step": 1}
            assert gate.take(kind, number, 0.0) is None


def test_a_host_that_is_gone_is_noticed_by_the_kernel() -> None:
    with gate_of(SECRET) as gate:
        ours, _ = dial(HOST, gate.port, SECRET, LineKind.HOST, 1)
        theirs = gate.take(LineKind.HOST, 1, 5.0)
        assert theirs is not None
        with ours, theirs:
            for end in (ours, theirs):
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                idle, interval, count = (
                    end.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (
                        socket.TCP_KEEPIDLE,
                        socket.TCP_KEEPINTVL,
                        socket.TCP_KEEPCNT,
                    )
                )
                assert idle + interval * count <= LOSS_S


@pytest.mark.parametrize(
    ("kind", "number", "said"),
    [
        (LineKind.HOST, 0, r"3 hosts, and those of other hosts are 1 to 2, not 0"),
        (LineKind.HOST, 3, r"not 3"),
        (LineKind.STEPS, 1, r"6 ranks, and those of other hosts are 2 to 5, not 1"),
        (LineKind.COPIES, 6, r"not 6"),
    ],
)
def test_numbers_that_no_other_host_has_are_refused(kind: LineKind, number: int, said: str) -> None:
    with gate_of(SECRET) as gate:
        with pytest.raises(RefusedLineError, match=said):
            dial(HOST, gate.port, SECRET, kind, number)
        assert gate.take(kind, number, 0.0) is None


def test_a_host_that_is_there_already_is_to_come_again() -> None:
    with gate_of(SECRET) as gate:
        line, _ = dial(HOST, gate.port, SECRET, LineKind.HOST, 1)
        with line, pytest.raises(LostError, match="host 1 is there already"):
            dial(HOST, gate.port, SECRET, LineKind.HOST, 1)


def test_another_version_is_refused() -> None:
    class Older(RankGate):
        """Hears from a host that is newer than itself."""

        def _refusal(self, kind: LineKind, number: int, version: int) -> str:
            return super()._refusal(kind, number, version + 1)

    with (
        closing(Older(HOST, 0, SECRET, num_hosts=2, host_ranks=1)) as gate,
        pytest.raises(RefusedLineError, match="speaks version 1 with its ranks, not 2"),
    ):
        dial(HOST, gate.port, SECRET, LineKind.HOST, 1)


@pytest.mark.parametrize("access", [OPEN, RankAccess(secret=MeshSecret(new_secret()))])
def test_a_host_without_the_secret_is_told_nothing(access: RankAccess) -> None:
    with gate_of(SECRET) as gate:
        with pytest.raises(LostError, match="closed"):
            dial(HOST, gate.port, access, LineKind.HOST, 1)
        assert gate.take(LineKind.HOST, 1, 0.0) is None


def test_a_leader_without_the_secret_is_not_followed() -> None:
    class Accepts(RankGate):
        """Believes everybody."""

        def _checked_hello(self, end: socket.socket) -> tuple[LineKind, int]:
            end.sendall(encoded({"nonce": "00"}))
            receive(end)
            end.sendall(encoded({"proof": "00" * 32, "refusal": "", "wait": "", "ranks": []}))
            return LineKind.HOST, 1

    with (
        closing(Accepts(HOST, 0, OPEN, num_hosts=2, host_ranks=1)) as gate,
        pytest.raises(LostError, match="does not have this mesh's secret"),
    ):
        dial(HOST, gate.port, SECRET, LineKind.HOST, 1)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\x7f{}",
        b"\2\0\0\0[]",
        encoded({"kind": "host"}),
        encoded({"kind": "root", "number": 1, "version": 1, "nonce": "", "proof": ""}),
        encoded({"kind": "host", "number": "x", "version": 1, "nonce": "", "proof": ""}),
        encoded({"kind": "host", "number": 1, "version": 1, "nonce": [], "proof": "é"}),
        b"\4\0\0\0\xff\xfe\xfd\xfc",
    ],
)
async def test_strangers_are_cut_and_the_gate_stays(
    junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with gate_of(SECRET) as gate, socket.create_connection((HOST, gate.port)) as stranger:
        receive(stranger)
        stranger.settimeout(5.0)
        heard = b""
        with contextlib.suppress(OSError):  # it may be cut before it has said all
            stranger.sendall(junk)
            stranger.shutdown(socket.SHUT_WR)
            heard = stranger.recv(100)
        assert heard == b""
        await until(lambda: "rank_line_refused" in caplog.text, "it is told")
        line, _ = dial(HOST, gate.port, SECRET, LineKind.HOST, 1)
        line.close()


def test_a_stranger_that_dawdles_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_lines, "HANDSHAKE_S", 0.3)
    with gate_of(SECRET) as gate, socket.create_connection((HOST, gate.port)) as stranger:
        receive(stranger)
        stranger.sendall((4000).to_bytes(4, "little"))
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 10.0:  # each byte comes in time
                stranger.sendall(b" ")
                time.sleep(0.02)
        assert 0.2 < time.monotonic() - began < 5.0


def test_a_gate_that_anybody_could_use_does_not_open() -> None:
    with pytest.raises(ConfigError, match=r"server\.secret_file on all of them, or data\.tls"):
        RankGate("0.0.0.0", 0, OPEN, num_hosts=2, host_ranks=1)
    RankGate("0.0.0.0", 0, SECRET, num_hosts=2, host_ranks=1).close()


def test_a_taken_port_is_named() -> None:
    with (
        gate_of(SECRET) as gate,
        pytest.raises(ConfigError, match=rf"ranks_port: cannot listen on .*:{gate.port}"),
    ):
        RankGate(HOST, gate.port, SECRET, num_hosts=2, host_ranks=1)


def test_a_closed_gate_takes_nobody() -> None:
    with gate_of(SECRET) as gate:
        gate.close()
        with pytest.raises(LostError):
            dial(HOST, gate.port, SECRET, LineKind.HOST, 1)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    assert make_certs(["--out", str(folder), "--hosts", HOST]) == 0
    return folder


def known(context: ssl.SSLContext | None, peers: str = "") -> DataTls:
    """The settings of one end."""
    assert context is not None
    return DataTls(context, frozenset(filter(None, [peers])))


def test_certificates_are_shown_as_on_data_channels(certificates: Path) -> None:
    tls = {
        name: PeerTls(
            cert=str(certificates / f"{name}.pem"),
            key=str(certificates / f"{name}.key"),
            ca=str(certificates / "ca.pem"),
        )
        for name in ("prefill", "decode")
    }
    leader = known(server_context(tls["prefill"], "data.tls"), "decode")
    leader_access = RankAccess(leader)
    leader_access.check("0.0.0.0")  # who shows no certificate is no stranger that gets in
    host = RankAccess(known(client_context(tls["decode"], "data.tls"), "prefill"))
    other = RankAccess(known(client_context(tls["prefill"], "data.tls")))
    deceived = RankAccess(known(client_context(tls["decode"], "data.tls"), "gateway"))
    with gate_of(leader_access) as gate:
        line, answer = dial(HOST, gate.port, host, LineKind.HOST, 1)
        theirs = gate.take(LineKind.HOST, 1, 5.0)
        assert theirs is not None
        with line, theirs:
            assert isinstance(line, ssl.SSLSocket)
            assert answer["ranks"] == [2, 3]
        for wrong in (other, deceived, OPEN):
            with pytest.raises(LostError):
                dial(HOST, gate.port, wrong, LineKind.HOST, 2)
        assert gate.take(LineKind.HOST, 2, 0.0) is None


def test_messages_are_json_of_a_limited_length() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        raw = json.dumps({"a": "b" * 100}).encode()
        ours.sendall(len(raw).to_bytes(4, "little") + raw)
        with pytest.raises(ValueError, match="longer than 50"):
            receive(theirs, 50)
