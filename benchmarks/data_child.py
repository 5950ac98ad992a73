"""A process of its own with the receiving end of a data plane, for the benchmarks that need one.

Its module prints the address as one line of JSON and lives until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvmesh.core.types import Endpoint, HostRoute
from kvmesh.transfer.data_server import DataAddress

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class DataChild:
    """A process that listens."""

    address: DataAddress
    pid: int


@contextlib.contextmanager
def data_child(module: str, spec: DataclassInstance) -> Iterator[DataChild]:
    """Runs a module with a spec as its only argument, and ends it.

    Args:
        module: ends in `announced`.
        spec: its fields as JSON are the argument.
    """
    command = [sys.executable, "-m", module, json.dumps(dataclasses.asdict(spec))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said: dict[str, Any] = json.loads(process.stdout.readline())
        route = HostRoute(*said["route"]) if said["route"] else None
        yield DataChild(DataAddress(Endpoint(*said["endpoint"]), route), process.pid)
    finally:
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()


async def announced(address: DataAddress) -> None:
    """In the child: says where it listens, and returns when it is to end."""
    said = {
        "endpoint": dataclasses.astuple(address.endpoint),
        "route": dataclasses.astuple(address.route) if address.route else None,
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
