"""A clone of the repository in which `make up` runs as on a machine that never ran it before.

Processes are found by a variable in their environment, so whatever a start leaves running is seen,
wherever it has been reparented. Tests: tests/unit/benchmarks/test_first_start.py.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

MARK = "FIRST_START_MARK"
"""Environment variable that all processes of a sandbox inherit."""

_READY = re.compile(r"ready: (http://\S+)")
_COMPILING = "building native kernels"
_UNFINISHED = ("*.part", "*.tmp", "*.lock.*", "pip-*", "cc*.s", "cc*.o")
_POLL_S = 0.05
_QUIET_S = 2.0
_KEPT_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ")
_KEPT_PREFIXES = ("PIP_", "SSL_", "REQUESTS_", "PYENV_")


class StartError(Exception):
    """A start ended or took too long before it served; carries what it printed."""


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds after the start of `make up`.

    Attributes:
        install_s: until the stack began to start, with everything installed and built.
        ready_s: until it said that it was ready.
        first_token_s: until the first token of a streamed chat arrived.
    """

    install_s: float
    ready_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a start left behind after its end.

    Attributes:
        processes: their command lines, cut short.
        files: paths of unfinished work.
    """

    processes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join((*self.processes, *self.files)) or "nothing"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A clone, an empty home, an empty temporary folder and a mark.

    Attributes:
        mark: value of `MARK` in the environment of everything that runs here.
    """

    clone_folder: Path
    home: Path
    temporary: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def clone(cls, source: Path, folder: Path) -> Sandbox:
        """Clones the repository into a folder beside a home and a temporary folder."""
        sandbox = cls(folder / "clone", folder / "home", folder / "tmp")
        sandbox.home.mkdir()
        sandbox.temporary.mkdir()
        command = ["git", "clone", "-q", "--no-hardlinks", str(source), str(sandbox.clone_folder)]
        subprocess.run(command, check=True)
        return sandbox

    def environment(self) -> dict[str, str]:
        """The environment of a person who has just logged in, with the mark."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in _KEPT_ENVIRONMENT or name.startswith(_KEPT_PREFIXES)
        }
        own = {"HOME": str(self.home), "TMPDIR": str(self.temporary), MARK: self.mark}
        return kept | own

    def make_up(self, cores: set[int] | None) -> AbstractContextManager[RunningStart]:
        """Runs `make up`, as a person would; see `running`."""
        return self.running(["make", "up", f"PORT={free_port()}"], cores)

    @contextmanager
    def running(
        self, command: Sequence[str], cores: set[int] | None = None
    ) -> Iterator[RunningStart]:
        """Runs a command in the clone; whatever still runs at the end of the block is killed.

        Args:
            cores: those that it may use; None for all.
        """
        if cores is not None:
            command = ["taskset", "--cpu-list", ",".join(map(str, sorted(cores))), *command]
        # A shell that started this process in the background has told it to ignore Ctrl-C.
        command = ["env", "--default-signal=INT", *command]
        with self._log().open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.clone_folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield RunningStart(self, process, time.monotonic())
        finally:
            for pid, _ in marked_processes(self.mark):
                _kill(pid)
            process.wait()

    def _log(self) -> Path:
        return self.clone_folder.parent / "make.log"

    def output(self) -> str:
        """What the last `make up` printed so far."""
        return self._log().read_text(errors="replace")

    def is_stack_starting(self) -> bool:
        """Whether everything is installed and the launcher runs."""
        return (self.clone_folder / ".kvmesh" / "lock").exists()

    def leftovers(self) -> Leftovers:
        """Processes and unfinished files; waits a moment for processes that are just ending."""
        deadline = time.monotonic() + _QUIET_S
        while (found := marked_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return Leftovers(tuple(name for _, name in found), tuple(self._unfinished_files()))

    def _unfinished_files(self) -> list[str]:
        found = [each for each in self.temporary.iterdir() if _holds_files(each)]
        for folder in (self.home, self.clone_folder):
            for pattern in _UNFINISHED:
                found += folder.rglob(pattern)
        if (self.clone_folder / ".kvmesh" / "stack.json").exists():
            found.append(self.clone_folder / ".kvmesh" / "stack.json")
        root = self.clone_folder.parent
        return [str(path.relative_to(root)) for path in found if ".venv/lib" not in str(path)]

    def num_packages(self) -> int:
        """Distributions in the virtual environment."""
        return sum(1 for _ in self.clone_folder.glob(".venv/lib/python*/site-packages/*.dist-info"))

    def venv_bytes(self) -> int:
        """Bytes on disk of the virtual environment."""
        done = subprocess.run(
            ["du", "-s", "--block-size=1", str(self.clone_folder / ".venv")],
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout.split()[0])


@dataclass(frozen=True, slots=True)
class RunningStart:
    """A command that runs."""

    sandbox: Sandbox
    process: subprocess.Popen[bytes]
    started_s: float

    def _since(self) -> float:
        return time.monotonic() - self.started_s

    def wait(self, seconds: float) -> str:
        """Lets it run until so long after its start; gives the stage that it is in then.

        Raises:
            StartError: it ended by itself.
        """
        while self._since() < seconds:
            self._check_running()
            time.sleep(min(_POLL_S, max(0.0, seconds - self._since())))
        if _READY.search(self.sandbox.output()):
            return "serving"
        if self.sandbox.is_stack_starting():
            return "starting"
        return "compiling" if _COMPILING in self.sandbox.output() else "installing"

    def wait_until_served(self, limit_s: float) -> Start:
        """Waits until it is ready and has streamed a token.

        Raises:
            StartError: it ended, or took longer than the limit.
        """
        was_starting = self.sandbox.is_stack_starting()
        install_s = 0.0
        while not (found := _READY.search(self.sandbox.output())):
            self._check_running()
            if not install_s and not was_starting and self.sandbox.is_stack_starting():
                install_s = self._since()
            if self._since() > limit_s:
                raise StartError(f"not ready after {limit_s:.0f} s:\n{self.sandbox.output()}")
            time.sleep(_POLL_S)
        ready_s = self._since()
        stream_one_token(found[1])
        return Start(install_s, ready_s, self._since())

    def _check_running(self) -> None:
        if self.process.poll() is not None:
            raise StartError(f"it ended with {self.process.returncode}:\n{self.sandbox.output()}")

    def interrupt(self, limit_s: float) -> float:
        """Ctrl-C, as a terminal sends it; gives the seconds until the command has ended.

        Raises:
            StartError: it did not end within the limit.
        """
        sent_s = time.monotonic()
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            output = self.sandbox.output()
            raise StartError(f"runs {limit_s:.0f} s after Ctrl-C:\n{output}") from error

        return time.monotonic() - sent_s


def _holds_files(path: Path) -> bool:
    """Whether it is a file, or a folder with files at any depth."""
    return not path.is_dir() or any(not each.is_dir() for each in path.rglob("*"))


def stream_one_token(url: str) -> None:
    """Asks for a streamed chat and reads up to its first piece of text.

    Raises:
        StartError: the answer was no stream with text.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    body = {
        "messages": [{"role": "user", "content": "Explain json.dumps"}],
        "max_tokens": 8,
        "stream": True,
    }
    try:
        head = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
        answer = connection.getresponse()
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[len(b"data: ") :]).get("choices")
                if choices and choices[0]["delta"].get("content"):
                    return
        raise StartError(f"status {answer.status}, and no text in the stream")
    finally:
        connection.close()


def marked_processes(mark: str) -> list[tuple[int, str]]:
    """Process ids and command names of all processes whose environment holds the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                found.append((int(folder.name), b" ".join(words[:4]).decode(errors="replace")))
        except OSError:  # it has ended, or belongs to somebody else
            continue
    return [(pid, name) for pid, name in found if name and pid != os.getpid()]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def free_port() -> int:
    """A port that nobody listens on, with the two after it.

    It lies below the ports that the kernel gives to connections: those come and go at any moment.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, 30_000)
        if all(map(_is_free, (port, port + 1, port + 2))):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@contextmanager
def busy_loops(count: int, cores: set[int]) -> Iterator[None]:
    """Processes that compute without end on some cores."""
    # They end with this process, even if it is killed.
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    running = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        for process in running:
            os.sched_setaffinity(process.pid, cores)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
