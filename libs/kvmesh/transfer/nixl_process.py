"""A worker's end of a child process that holds a NIXL agent (`nixl_child.py`).

The engine cannot stop a read: bytes of a cancelled read still arrive, and the engine may crash its
process. The child process can be killed, which ends both. Tests:
tests/integration/test_nixl.py.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

from kvmesh.transfer.nixl_child import APIS, FAILED, HEAD

MAX_ANSWER_BYTES = 64 << 10

_REAP_S = 0.002
"""Seconds between checks whether a killed process is gone."""
_CHILD = Path(__file__).with_name("nixl_child.py")


class EngineError(Exception):
    """The engine refused or its process is gone; the message says why."""


def is_installed() -> bool:
    """Returns whether the extra `nixl` is installed; loads nothing of it."""
    return any(importlib.util.find_spec(name.partition(".")[0]) for name in APIS)


class NixlProcess:
    """A running child process. After a cancelled call it must be killed."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Use `start`."""
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, role: Literal["own", "read"], fd: int, num_bytes: int) -> NixlProcess:
        """Starts a child over the pool behind a descriptor; its first answer is READY.

        Raises:
            EngineError: no process can be started.
        """
        here, there = socket.socketpair()
        try:
            with there:
                process = _spawn(role, fd, num_bytes, there.fileno())
        except OSError as error:
            here.close()
            raise EngineError(f"no process for NIXL: {error}") from error
        here.setblocking(False)
        try:
            return cls(process, *await asyncio.open_connection(sock=here))
        except BaseException:
            here.close()
            _end(process)
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, according to the kernel."""
        return self._process.poll() is None

    async def answer(self) -> bytes:
        """Waits for the child's next answer.

        Raises:
            EngineError: the request failed or the process ended.
        """
        try:
            kind, size = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            if size > MAX_ANSWER_BYTES:
                raise EngineError(f"{size} bytes of answer")
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            await self.killed()  # without its pipe the process is useless
            code = self._process.returncode
            raise EngineError(f"the process of NIXL has ended with {code}") from error
        if kind == FAILED:
            raise EngineError(f"NIXL: {body.decode(errors='replace')}")
        return body

    async def ask(self, kind: int, body: bytes) -> bytes:
        """Sends a request and waits for the answer; one at a time.

        Raises:
            EngineError: as `answer`.
        """
        self.tell(kind, body)
        return await self.answer()

    def tell(self, kind: int, body: bytes = b"") -> None:
        """Sends a message that has no answer; does nothing if the process has ended."""
        if self.is_alive and not self._writer.is_closing():
            self._writer.write(HEAD.pack(kind, len(body)) + body)

    def kill(self) -> None:
        """Kills the process without waiting, and closes the pipe to it. May be called again."""
        self._process.kill()
        self._writer.close()

    async def killed(self) -> None:
        """Kills the process and waits until it is gone and no longer touches the pool.

        Waits even if the caller is cancelled, and raises CancelledError afterwards.
        """
        self.kill()
        cancelled = False
        while self.is_alive:
            try:
                await asyncio.sleep(_REAP_S)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a child that has just started and waits for its end, which takes a moment."""
    process.kill()
    process.wait()


def _spawn(role: str, fd: int, num_bytes: int, pipe: int) -> subprocess.Popen[bytes]:
    # Not by the event loop: libuv forks, which runs gRPC's fork handlers.
    # -P: the folder of the script is not one to import from.
    command = [sys.executable, "-P", str(_CHILD), role, str(fd), str(num_bytes)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=(fd,))
