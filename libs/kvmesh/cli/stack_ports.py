"""Ports of a local stack that people type: HTTP, gRPC and the console, one after the other.

Tests: tests/unit/cli/test_stack_ports.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.cli.probes import next_free_port

_LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ApiPorts:
    """Where the gateway listens besides its HTTP port.

    Attributes:
        grpc, console: 0 takes a free one.
        notes: what was taken, and what is used instead; for people.
    """

    grpc: int
    console: int
    notes: tuple[str, ...] = ()


def api_ports(http: int, grpc: int, console: int) -> ApiPorts:
    """The ports after the HTTP port, or the next free ones.

    Args:
        http: 0 for a free one; then the others are free ones, too.
        grpc, console: as asked for; 0 for the first and the second port after `http`.
    """
    if not http:
        return ApiPorts(grpc, console)
    notes: list[str] = []

    def after(step: int, what: str, used: set[int]) -> int:
        port = next_free_port(_LOCAL, http + step, used)
        if port != http + step:
            notes.append(f"port {http + step} is not free; {what} uses {port or 'a free one'}")
        return port

    grpc = grpc or after(1, "the gRPC API", {console})
    console = console or after(2, "the console", {grpc})
    return ApiPorts(grpc, console, tuple(notes))
