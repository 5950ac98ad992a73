from __future__ import annotations

import socket
from contextlib import ExitStack

from kvmesh.cli.probes import is_free
from kvmesh.cli.stack_ports import api_ports
from kvmesh.core.types import Endpoint


def _row_of_free_ports(length: int) -> int:
    """The first of so many ports that are free, one after the other."""
    for first in range(20_000, 30_000, length):
        if all(is_free(Endpoint("127.0.0.1", first + step)) for step in range(length)):
            return first
    raise AssertionError("no such row")


def test_grpc_and_the_console_follow_the_http_port() -> None:
    http = _row_of_free_ports(3)
    ports = api_ports(http, 0, 0)
    assert (ports.grpc, ports.console, ports.notes) == (http + 1, http + 2, ())


def test_a_busy_port_gives_way_to_the_next_free_one_and_that_is_said() -> None:
    http = _row_of_free_ports(6)
    with ExitStack() as busy:
        for port in (http + 2, http + 3):
            taken = busy.enter_context(socket.socket())
            taken.bind(("127.0.0.1", port))
            taken.listen()
        ports = api_ports(http, 0, 0)
    assert (ports.grpc, ports.console) == (http + 1, http + 4)
    assert ports.notes == (f"port {http + 2} is not free; the console uses {http + 4}",)


def test_one_does_not_take_the_port_of_the_other() -> None:
    http = _row_of_free_ports(6)
    assert api_ports(http, http + 2, 0).console == http + 3
    assert api_ports(http, 0, http + 1).grpc == http + 2


def test_ports_that_are_asked_for_stay() -> None:
    ports = api_ports(0, 0, 0)
    assert (ports.grpc, ports.console, ports.notes) == (0, 0, ())
    http = _row_of_free_ports(6)
    ports = api_ports(http, http + 4, http + 5)
    assert (ports.grpc, ports.console, ports.notes) == (http + 4, http + 5, ())


def test_after_the_last_port_there_are_free_ones() -> None:
    ports = api_ports(65_535, 0, 0)
    assert (ports.grpc, ports.console, len(ports.notes)) == (0, 0, 2)
