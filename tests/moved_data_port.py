"""A worker that announces a data port where nobody listens, as behind a wrong port mapping."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from kvmesh.transfer.data_server import DataAddress, DataServer


def announced_by(folder: Path, name: str) -> Path:
    """The file with the port that a worker of a stack announces."""
    return folder / f"{name}.announced"


def bound_by(folder: Path, name: str) -> Path:
    """The file with the port at which it listens."""
    return folder / f"{name}.bound"


def move_data_port(folder: Path, *names: str) -> None:
    """Lets workers of a stack that is started with this folder announce another port."""
    for name in names:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            announced_by(folder, name).write_text(str(free.getsockname()[1]))
    (folder / "sitecustomize.py").write_text(
        "import pathlib, sys\n"
        f"for name in {names!r}:\n"
        "    if name in sys.orig_argv:\n"
        "        from tests.moved_data_port import announce_it\n"
        f"        announce_it(pathlib.Path({str(folder)!r}), name)\n"
    )


def announce_it(folder: Path, name: str) -> None:
    """Makes this process announce the port of the file, and no way within the host."""
    start = DataServer.start

    async def moved(server: DataServer) -> DataAddress:
        bound = await start(server)
        bound_by(folder, name).write_text(str(bound.endpoint.port))
        port = int(announced_by(folder, name).read_text())
        return DataAddress(dataclasses.replace(bound.endpoint, port=port), None)

    DataServer.start = moved  # type: ignore[assignment,method-assign]


@contextlib.asynccontextmanager
async def repaired(folder: Path, name: str) -> AsyncIterator[None]:
    """The announced port leads to the worker."""
    target = int(bound_by(folder, name).read_text())

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    port = int(announced_by(folder, name).read_text())
    server = await asyncio.start_server(carry, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
