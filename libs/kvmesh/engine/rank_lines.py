"""Connections between the hosts of one engine: the leader listens, the other hosts dial.

Both ends prove that they have the mesh's secret, with HMACs of two nonces, or show certificates as
on data channels, or both. A line that the kernel finds dead is closed within `LOSS_S`.
Torch-free. Tests: tests/unit/engine/test_rank_lines.py.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import Any

from kvmesh.core.errors import ConfigError, LostError
from kvmesh.core.mesh_secret import THIS_HOST, MeshSecret
from kvmesh.engine.vllm_messages import encoded, receive
from kvmesh.telemetry.logs import event_logger
from kvmesh.transfer.tls import DataTls, WrongPeerError, check_peer, common_name

log = event_logger(__name__)

LOSS_S = 3
"""Seconds without a sign of the other host after which the kernel ends a `HOST` line."""

HANDSHAKE_S = 10.0
"""Maximum seconds from the connection to the leader's answer."""

NUM_LINES = 4
"""`COPIES` lines of a rank, and so the copies that it makes at once."""

_VERSION = 1
_HELLO_BYTES = 4096
_NONCE_BYTES = 32
_HOST_PURPOSE, _LEADER_PURPOSE = "rank host", "rank leader"
_MAX_HANDSHAKES = 64


class RefusedLineError(ConfigError):
    """The leader has answered that it does not take the line."""


class LineKind(StrEnum):
    """The purposes of lines.

    Attributes:
        HOST: says nothing after its start; it ends when one of the two ends has ended.
        STEPS: the steps of one rank.
        COPIES: blocks to and from one rank.
    """

    HOST = "host"
    STEPS = "steps"
    COPIES = "copies"


@dataclass(frozen=True, slots=True)
class RankAccess:
    """Credentials of one end of a line.

    Attributes:
        tls: of this end; None: plain text.
        secret: of the mesh.
    """

    tls: DataTls | None = None
    secret: MeshSecret | None = None

    def check(self, host: str) -> None:
        """Checks that a leader at an address requires credentials.

        Raises:
            ConfigError: it has none, and other hosts reach the address.
        """
        shows_certificate = (
            self.tls is not None and self.tls.context.verify_mode is ssl.CERT_REQUIRED
        )
        is_closed = self.secret is not None or shows_certificate
        if not is_closed and host not in THIS_HOST:
            raise ConfigError(
                "ranks on several hosts prove that they belong to the mesh: set "
                "server.secret_file on all of them, or data.tls.* here and ranks.tls.* there"
            )


class RankGate:
    """The leader's end: takes lines from the other hosts until `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        access: RankAccess,
        *,
        num_hosts: int,
        host_ranks: int,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        """Listens.

        Args:
            port: 0 takes a free one.
            num_hosts: hosts of the engine, the leader's included.
            host_ranks: ranks of each host.
            told: told to each host.

        Raises:
            ConfigError: the address is taken, or anybody could open a line.
        """
        access.check(host)
        self._access = access
        self._num_hosts = num_hosts
        self._host_ranks = host_ranks
        self._told = dict(told or {})
        self._lock = threading.Lock()
        self._is_closed = False
        self._hosts: set[int] = set()
        self._arrived: defaultdict[tuple[LineKind, int], SimpleQueue[socket.socket]] = defaultdict(
            SimpleQueue
        )
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            text = f"engine.ranks_port: cannot listen on {host}:{port}: {error.strerror}"
            raise ConfigError(text) from error
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="rank-gate", daemon=True).start()

    def take(self, kind: LineKind, number: int, timeout_s: float) -> socket.socket | None:
        """Waits for a line; None if none came in time.

        Args:
            number: of the host, or of the rank.
        """
        with self._lock:
            arrived = self._arrived[kind, number]
        with contextlib.suppress(Empty):
            return arrived.get(timeout=timeout_s)
        return None

    def close(self) -> None:
        """Takes no more lines, and closes those that nobody took. May be called again."""
        cut(self._listener)  # wakes the thread
        self._listener.close()
        with self._lock:
            self._is_closed = True
            for arrived in self._arrived.values():
                while not arrived.empty():
                    arrived.get().close()

    def _accept(self) -> None:
        while True:
            self._handshakes.acquire()
            try:
                end, address = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._greet, args=(end, address[0]), name="rank-line", daemon=True
            ).start()

    def _greet(self, end: socket.socket, address: str) -> None:
        try:
            with _limited(end), contextlib.ExitStack() as on_failure:
                on_failure.callback(end.close)
                if (tls := self._access.tls) is not None:
                    end = tls.context.wrap_socket(end, server_side=True)
                    on_failure.callback(end.close)
                    check_peer(common_name(end.getpeercert()), tls.peers)
                kind, number = self._checked_hello(end)
                _tune(end, kind)
                with self._lock:
                    if not self._is_closed:
                        self._arrived[kind, number].put(end)
                        on_failure.pop_all()
        except (OSError, EOFError, ValueError, WrongPeerError) as error:
            log.warning("rank_line_refused", address=address, reason=str(error) or "closed")
        finally:
            self._handshakes.release()

    def _checked_hello(self, end: socket.socket) -> tuple[LineKind, int]:
        ours = secrets.token_hex(_NONCE_BYTES)
        end.sendall(encoded({"nonce": ours}))
        hello = receive(end, _HELLO_BYTES)
        try:
            kind, number, theirs = LineKind(hello["kind"]), int(hello["number"]), hello["nonce"]
            version, proof = int(hello["version"]), str(hello["proof"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a rank's greeting: {error!r}") from error
        content = _content(ours, theirs, kind, number)
        if not _is_same(proof, _proof(self._access, _HOST_PURPOSE, content)):
            # Callers without the secret get no answer.
            raise ValueError("the proof is not made with this mesh's secret")
        answer: dict[str, Any] = {"proof": _proof(self._access, _LEADER_PURPOSE, content)}
        refusal, wait = self._refusal(kind, number, version), ""
        if kind is LineKind.HOST and not refusal:
            first = number * self._host_ranks
            answer |= {"ranks": list(range(first, first + self._host_ranks)), **self._told}
            wait = self._doubt(number)
        end.sendall(encoded({**answer, "refusal": refusal, "wait": wait}))
        if refusal or wait:
            raise ValueError(refusal or wait)
        return kind, number

    def _doubt(self, number: int) -> str:
        """Why a host is to try again later; empty if it is welcome."""
        with self._lock:
            if number in self._hosts:
                return f"host {number} is there already"
            self._hosts.add(number)
            return ""

    def _refusal(self, kind: LineKind, number: int, version: int) -> str:
        if version != _VERSION:
            return f"this leader speaks version {_VERSION} with its ranks, not {version}"
        if kind is LineKind.HOST:
            what, first, count = "hosts", 1, self._num_hosts
        else:
            what, first = "ranks", self._host_ranks
            count = self._num_hosts * self._host_ranks
        if first <= number < count:
            return ""
        return (
            f"the engine has {count} {what}, and those of other hosts are {first} to {count - 1}, "
            f"not {number}"
        )


def dial(
    host: str, port: int, access: RankAccess, kind: LineKind, number: int
) -> tuple[socket.socket, dict[str, Any]]:
    """Opens a line to the leader, and returns it with the answer.

    Args:
        number: of this host, or of a rank on it.

    Raises:
        LostError: the leader does not answer, proves nothing, or has such a host already.
        RefusedLineError: it refuses the line.
    """
    try:
        with contextlib.ExitStack() as on_failure:
            end = socket.create_connection((host, port), HANDSHAKE_S)
            on_failure.callback(end.close)
            if (tls := access.tls) is not None:
                end = tls.context.wrap_socket(end, server_hostname=tls.peer_name or host)
                on_failure.callback(end.close)
                check_peer(common_name(end.getpeercert()), tls.peers)
            answer = _greeted(end, access, kind, number)
            _tune(end, kind)
            on_failure.pop_all()
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise LostError(f"{host}:{port}: {str(error) or 'closed by the leader'}") from error
    return end, answer


def _greeted(end: socket.socket, access: RankAccess, kind: LineKind, number: int) -> dict[str, Any]:
    theirs = receive(end, _HELLO_BYTES)["nonce"]
    ours = secrets.token_hex(_NONCE_BYTES)
    content = _content(theirs, ours, kind, number)
    hello = {
        "kind": kind.value,
        "number": number,
        "version": _VERSION,
        "nonce": ours,
        "proof": _proof(access, _HOST_PURPOSE, content),
    }
    end.sendall(encoded(hello))
    answer = receive(end, _HELLO_BYTES)
    if not _is_same(str(answer["proof"]), _proof(access, _LEADER_PURPOSE, content)):
        raise LostError("who listens there does not have this mesh's secret")
    if answer["refusal"]:
        raise RefusedLineError(answer["refusal"])
    if answer["wait"]:
        raise LostError(answer["wait"])
    return answer


def cut(end: socket.socket) -> None:
    """Ends a connection, also for threads that wait for it in a call. May be called again."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _limited(end: socket.socket) -> Iterator[None]:
    """Cuts a connection whose handshake takes too long, also one that sends byte by byte."""
    with end.dup() as same:
        limit = threading.Timer(HANDSHAKE_S, cut, [same])
        limit.daemon = True
        limit.start()
        try:
            yield
        finally:
            limit.cancel()


def _content(leader_nonce: str, host_nonce: str, kind: LineKind, number: int) -> bytes:
    return f"{leader_nonce} {host_nonce} {kind.value} {number}".encode()


def _is_same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def _proof(access: RankAccess, purpose: str, content: bytes) -> str:
    return "" if access.secret is None else access.secret.proof(purpose, content).hex()


def _tune(end: socket.socket, kind: LineKind) -> None:
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind is LineKind.HOST:
        # A host that is gone says nothing, not even that it is gone.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOSS_S - 1)
