"""Ports of a local stack that people type: HTTP, gRPC and console, with consecutive numbers.

Tests: tests/unit/cli/test_stack_ports.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.cli.probes import next_free_port

_LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ApiPorts:
    """Ports of the gateway besides its HTTP port.

    Attributes:
        grpc, console: port numbers; 0 picks a free one.
        notes: messages about taken ports and their replacements, for people.
    """

    grpc: int
    console: int
    notes: tuple[str, ...] = ()


def api_ports(http: int, grpc: int, console: int) -> ApiPorts:
    """Returns the two ports after the HTTP port, or the next free ones.

    Args:
        http: the HTTP port; with 0 (a free one) the others are free ones too.
        grpc, console: the wanted ports; 0 for the first and the second port after `http`.
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
