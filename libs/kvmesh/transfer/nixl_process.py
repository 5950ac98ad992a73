"""A worker's end of a process that holds a NIXL agent (`nixl_child.py`).

The engine cannot stop a read: bytes of one that was given up still arrive, and it may take its
process down. In a process of its own it can be killed, which ends both. Tests:
tests/integration/test_nixl.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Literal

from kvmesh.transfer.nixl_child import APIS, FAILED, HEAD

MAX_ANSWER_BYTES = 64 << 10

_CHILD = Path(__file__).with_name("nixl_child.py")


class EngineError(Exception):
    """The engine cannot do it, or its process is gone; the message says why."""


def is_installed() -> bool:
    """Whether the extra `nixl` is there; nothing of it is loaded."""
    return any(importlib.util.find_spec(name.partition(".")[0]) for name in APIS)


class NixlProcess:
    """A running one. After a call that was cancelled it must be killed."""

    def __init__(self, process: Process) -> None:
        """Use `start`."""
        self._process = process

    @classmethod
    async def start(cls, role: Literal["own", "read"], fd: int, num_bytes: int) -> NixlProcess:
        """Starts one over the pool behind a descriptor; its first answer is READY.

        Raises:
            EngineError: no process can be started.
        """
        # -P: the folder of the script is not one to import from.
        command = [sys.executable, "-P", str(_CHILD), role, str(fd), str(num_bytes)]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, pass_fds=(fd,)
            )
        except OSError as error:
            raise EngineError(f"no process for NIXL: {error}") from error
        return cls(process)

    @property
    def is_alive(self) -> bool:
        """Whether it runs, as the kernel knows it: the event loop hears of its end later."""
        if self._process.returncode is not None:
            return False
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, look) is None
        except ChildProcessError:
            return False

    async def answer(self) -> bytes:
        """What it says next.

        Raises:
            EngineError: it failed or ended.
        """
        assert self._process.stdout is not None, "piped"
        try:
            kind, size = HEAD.unpack(await self._process.stdout.readexactly(HEAD.size))
            if size > MAX_ANSWER_BYTES:
                raise EngineError(f"{size} bytes of answer")
            body = await self._process.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EngineError("the process of NIXL has ended") from error
        if kind == FAILED:
            raise EngineError(f"NIXL: {body.decode(errors='replace')}")
        return body

    async def ask(self, kind: int, body: bytes) -> bytes:
        """Says something and waits for the answer; one at a time.

        Raises:
            EngineError: as `answer`.
        """
        self.tell(kind, body)
        return await self.answer()

    def tell(self, kind: int, body: bytes = b"") -> None:
        """Says something that has no answer; nothing happens when it has ended."""
        assert self._process.stdin is not None, "piped"
        if self.is_alive and not self._process.stdin.is_closing():
            self._process.stdin.write(HEAD.pack(kind, len(body)) + body)

    def kill(self) -> None:
        """Ends it soon. May be called again."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def killed(self) -> None:
        """Ends it; nothing of it touches the pool any more, even if the caller is cancelled."""
        self.kill()
        over = asyncio.ensure_future(self._process.wait())
        cancelled = False
        while not over.done():
            try:
                await asyncio.wait({over})
            except asyncio.CancelledError:
                cancelled = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        if cancelled:
            raise asyncio.CancelledError
