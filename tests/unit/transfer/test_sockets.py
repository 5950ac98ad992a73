"""Where endpoints are, asked by threads that may block."""

import socket
import threading

import pytest

from kvmesh.core.errors import LostError
from kvmesh.core.types import Endpoint
from kvmesh.transfer.sockets import resolve_blocking


def test_an_address_is_found() -> None:
    family, kind, _, _, where = resolve_blocking(Endpoint("127.0.0.1", 7), timeout_s=30)
    assert (family, kind, where) == (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 7))


def test_an_unknown_name_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(LostError, match="no such name"):
        resolve_blocking(Endpoint("worker", 7), timeout_s=30)


def test_a_silent_name_server_is_waited_for_no_longer_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speaks = threading.Event()

    def hang(*args: object, **kwargs: object) -> None:
        speaks.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "at last")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with pytest.raises(LostError, match="its name is not resolved"):
        resolve_blocking(Endpoint("worker", 7), timeout_s=0.01)
    speaks.set()
