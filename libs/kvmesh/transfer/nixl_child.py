"""A NIXL agent in a process of its own, run and killed by `nixl_process.py`.

    python nixl_child.py own|read FD NUM_BYTES

Maps the pool behind the descriptor and answers on standard output: `own` registers the pool for
others to read, `read` reads another's into it. Imports nothing of this package, so that it starts
quickly wherever it is run from. Tests: tests/integration/test_nixl.py.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import mmap
import os
import secrets
import select
import struct
import sys
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

HEAD = struct.Struct("<BI")
"""Head of a message: kind, and number of bytes that follow."""
READY, DONE, FAILED = 1, 2, 3
"""Messages to the worker: READY of `own` carries address and metadata, FAILED a reason."""
ATTACH, READ, BUSY, IDLE = 16, 17, 18, 19
"""Messages from the worker. READ carries (offset here, offset there, bytes) as u64 triples."""
ADDRESS = struct.Struct("<Q")
APIS = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")

_MEMORY = "DRAM"
_IDLE_WAIT_S = 0.05
_BUSY_WAIT_S = 50e-6
"""Seconds between engine polls while peers read; RDMA-capable adapters need few polls."""
_POLLS_PER_LOOK = 4096


class _OtherEnd:
    """The worker's end of the pipes."""

    def __init__(self) -> None:
        self._questions: BinaryIO = os.fdopen(os.dup(0), "rb", buffering=0)
        self._answers: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # the engine's own output goes to stderr
        self._parent = os.getppid()

    def say(self, kind: int, body: bytes = b"") -> None:
        self._answers.write(HEAD.pack(kind, len(body)) + body)

    def hear(self) -> tuple[int, bytes]:
        """Returns the next message; the process ends with the worker's end of the pipe."""
        kind, size = HEAD.unpack(self._take(HEAD.size))
        return int(kind), self._take(size)

    def has_question(self, wait_s: float) -> bool:
        return bool(select.select([self._questions], [], [], wait_s)[0])

    def leave_if_alone(self) -> None:
        if os.getppid() != self._parent:
            _leave()

    def _take(self, size: int) -> bytes:
        taken = b""
        while len(taken) < size:
            piece = self._questions.read(size - len(taken))
            if not piece:
                _leave()
            taken += piece
        return taken


class Engine(NamedTuple):
    """The loaded engine.

    Attributes:
        errors: all exception types that it raises.
    """

    api: Any
    errors: tuple[type[Exception], ...]

    def agent(self, role: str) -> Any:
        """Creates an agent."""
        # No progress thread: both roles drive the agent, and an idle thread takes a third of a
        # core.
        config = self.api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        return self.api.nixl_agent(f"kvmesh-{role}-{secrets.token_hex(8)}", config)


class Owner:
    """Offers a pool for others to read."""

    def __init__(self, agent: Any, pool: NDArray[np.uint8]) -> None:
        self._agent, self._pool = agent, pool
        address = int(pool.__array_interface__["data"][0])
        agent.register_memory([(address, pool.size, 0, "")], _MEMORY)
        self.offer = ADDRESS.pack(address) + agent.get_agent_metadata()

    def serve(self, other_end: _OtherEnd) -> None:
        """Runs until the worker ends. Some transports need this process's CPU while peers read."""
        is_busy = False
        while True:
            if other_end.has_question(_BUSY_WAIT_S if is_busy else _IDLE_WAIT_S):
                is_busy = other_end.hear()[0] == BUSY
            self._agent.get_new_notifs()


class Reader:
    """Reads one peer's pool into this one."""

    def __init__(self, engine: Engine, pool: NDArray[np.uint8]) -> None:
        self._errors = engine.errors
        self._agent = agent = engine.agent("read")
        self._pool = pool
        self._here = int(pool.__array_interface__["data"][0])
        agent.register_memory([(self._here, pool.size, 0, "")], _MEMORY)
        self._there = 0
        self._peer = ""

    def serve(self, other_end: _OtherEnd) -> None:
        """Answers messages until the worker ends."""
        while True:
            kind, body = other_end.hear()
            try:
                if kind == ATTACH:
                    self._attach(body)
                else:
                    self._read(body, other_end)
            except self._errors as error:
                other_end.say(FAILED, str(error).encode())
            else:
                other_end.say(DONE)

    def _attach(self, body: bytes) -> None:
        (self._there,) = ADDRESS.unpack_from(body)
        name = self._agent.add_remote_agent(body[ADDRESS.size :])
        self._peer = name.decode() if isinstance(name, bytes) else name

    def _read(self, body: bytes, other_end: _OtherEnd) -> None:
        ranges = np.frombuffer(body, dtype=np.uint64).reshape(-1, 3)
        handle = self._agent.initialize_xfer(
            "READ",
            self._descriptors(ranges[:, 0] + np.uint64(self._here), ranges[:, 2]),
            self._descriptors(ranges[:, 1] + np.uint64(self._there), ranges[:, 2]),
            self._peer,
        )
        state, polls = self._agent.transfer(handle), 0
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
            polls += 1
            if polls % _POLLS_PER_LOOK == 0:
                other_end.leave_if_alone()
        handle.release()
        if state != "DONE":
            raise OSError(f"a read ended as {state}")

    def _descriptors(self, starts: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> Any:
        device = np.zeros_like(sizes)
        return self._agent.get_xfer_descs(np.stack([starts, sizes, device], axis=1), _MEMORY)


def load_engine() -> Engine:
    """Imports the engine, for whichever CUDA version it was built.

    Raises:
        ImportError: the extra `nixl` is missing or incomplete.
    """
    failure: ImportError | None = None
    for name in APIS:
        try:
            api = importlib.import_module(name)
        except ImportError as error:
            failure = failure or error
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)
        # Its exceptions have no common base class.
        own = vars(api.nixlBind).values()
        raised = [kind for kind in own if isinstance(kind, type) and issubclass(kind, Exception)]
        return Engine(api, (OSError, RuntimeError, ValueError, *raised))
    assert failure is not None, "there are names to try"
    raise failure


def _mapped(fd: int, num_bytes: int, *, writable: bool) -> NDArray[np.uint8]:
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, num_bytes, prot=access)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)


def _owner(engine: Engine, fd: int, num_bytes: int) -> Owner:
    # The keys that the engine publishes allow writes. A read-only mapping prevents them; for
    # adapters that refuse to register one the mapping is writable.
    agent = engine.agent("own")
    try:
        return Owner(agent, _mapped(fd, num_bytes, writable=False))
    except engine.errors:
        return Owner(agent, _mapped(fd, num_bytes, writable=True))


def _served(role: str, fd: int, num_bytes: int) -> Owner | Reader:
    engine = load_engine()
    try:
        if role == "own":
            return _owner(engine, fd, num_bytes)
        return Reader(engine, _mapped(fd, num_bytes, writable=True))
    except engine.errors as error:
        raise ImportError(f"NIXL does not start: {error}") from error


def _leave() -> NoReturn:
    os._exit(0)  # a regular exit may crash in the engine's destructors


def main() -> None:
    """Serves until the worker's end of standard input closes."""
    other_end = _OtherEnd()
    try:
        served = _served(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except ImportError as error:
        other_end.say(FAILED, str(error).encode())
        _leave()
    other_end.say(READY, served.offer if isinstance(served, Owner) else b"")
    served.serve(other_end)


if __name__ == "__main__":
    main()
