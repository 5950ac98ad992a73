"""`python scripts/build_native.py`: builds the C++ libraries beside their sources.

What is up to date stays. Units are compiled on all cores, by one process at a time. It needs no
package, so it runs before anything is installed; setup.py calls it for wheels.
Tests: tests/unit/packaging/test_build_native.py.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "libs") not in sys.path:  # the package need not be installed
    sys.path.insert(0, str(ROOT / "libs"))

from kvmesh.core.config import child_environment  # noqa: E402
from kvmesh.core.native_libraries import (  # noqa: E402
    LIBRARIES,
    Level,
    NativeLibrary,
    is_made_from,
    machine_levels,
    usable_levels,
)

_PACKAGE = ROOT / "libs" / "kvmesh"
_WORK = ROOT / "build" / "native"
_ENDED_S = 10.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]


class BuildError(Exception):
    """The compiler refused; the message holds what it said."""


@dataclass(frozen=True)
class Target:
    """One file to make.

    Attributes:
        extra: flags beside those that the library and the level name.
    """

    library: NativeLibrary
    level: Level
    path: Path
    extra: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """What the file will carry."""
        return self.library.digest(self.level, _PACKAGE)

    @property
    def flags(self) -> tuple[str, ...]:
        """All for the compiler."""
        return (*self.library.flags, *self.level.flags, *self.extra)

    def is_made(self) -> bool:
        """Whether it is there and carries the digest."""
        return self.path.is_file() and is_made_from(self.path, self.digest)


class Compilers:
    """The compilers that run: as many as there are cores, none of which outlives this process.

    Args:
        temporary: folder for their temporary files; one that is killed leaves them behind.
    """

    def __init__(self, cores: int, temporary: Path) -> None:
        self._cores = cores
        self._environment = child_environment({"TMPDIR": str(temporary)})
        self._running: list[tuple[subprocess.Popen[str], list[str]]] = []
        self._is_starting = False
        self._ended_by = 0

    def end_by(self, number: int, frame: FrameType | None) -> None:
        """As the handler of a signal: ends this process in the usual order, once.

        Raises:
            SystemExit: now, or as soon as the compiler that starts is known.
        """
        for each in _ENDING:
            signal.signal(each, signal.SIG_IGN)
        self._ended_by = 128 + number
        if not self._is_starting:
            raise SystemExit(self._ended_by)

    def start(self, command: list[str]) -> None:
        """Starts one, as soon as a core is free.

        Raises:
            BuildError: one before it failed.
        """
        while len(self._running) >= self._cores:
            self._end_one()
        self._is_starting = True
        process = subprocess.Popen(
            command,
            env=self._environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._running.append((process, command))
        self._is_starting = False
        if self._ended_by:
            raise SystemExit(self._ended_by)

    def wait(self) -> None:
        """Waits for all.

        Raises:
            BuildError: one failed.
        """
        while self._running:
            self._end_one()

    def kill(self) -> None:
        """Ends all, with the processes that they started."""
        for process, _ in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_ENDED_S)
        self._running.clear()

    def _end_one(self) -> None:
        process, command = self._running[0]
        said = process.communicate()[1]  # it stays in the list until it has ended
        self._running.pop(0)
        if process.returncode:
            raise BuildError(f"{' '.join(command)}\n{said}")
        sys.stderr.write(said)


def find_compiler() -> str | None:
    """Path of the C++ compiler; None without one."""
    return shutil.which("c++") or shutil.which("g++")


def targets(package: Path, levels: Sequence[Level], extra: tuple[str, ...] = ()) -> list[Target]:
    """All libraries at some levels, in the folders of a package."""
    return [
        Target(library, level, package / library.folder / library.file_name(level), extra)
        for level in levels
        for library in LIBRARIES
    ]


def build(wanted: Sequence[Target], say: Say) -> bool:
    """Makes what is not up to date; False if there is no compiler for it.

    Raises:
        BuildError: the compiler refused.
    """
    with _alone(say):
        todo = [target for target in wanted if not target.is_made()]
        compiler = find_compiler()
        if todo and compiler is None:
            say(
                "no C++ compiler: native kernels are left out, and workers are slower; install g++ "
                "(Debian, Ubuntu: apt-get install g++) and run `make setup`"
            )
            return False
        if todo and compiler is not None:
            _build(compiler, todo, say)
    return True


def _build(compiler: str, todo: Sequence[Target], say: Say) -> None:
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="part-", dir=_WORK))
    compilers = Compilers(len(os.sched_getaffinity(0)), folder)
    with _ended_by_signals(compilers):
        try:
            objects = _compile(compiler, compilers, todo, folder, say)
            for target in todo:
                own = [str(objects[target, unit]) for unit in target.library.units]
                _link(compiler, compilers, target, own, folder)
        finally:
            compilers.kill()
            shutil.rmtree(folder)
    _make_room()
    say(f"native kernels built in {time.monotonic() - started:.0f} s")


def _compile(
    compiler: str, compilers: Compilers, todo: Sequence[Target], folder: Path, say: Say
) -> dict[tuple[Target, str], Path]:
    """All units of all targets, by both, as far as they are not there."""
    started = time.monotonic()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    units = [(target, unit) for target in todo for unit in target.library.units]
    objects = {}
    for number, (target, unit) in enumerate(units, 1):
        seconds = time.monotonic() - started
        say(f"building native kernels, {seconds:.0f} s: part {number} of {len(units)}")
        made = objects[target, unit] = _object(target, unit, version)
        if not made.is_file():
            source = str(_PACKAGE / target.library.folder / unit)
            part = str(folder / made.name)
            compilers.start([compiler, *target.flags, "-c", source, "-o", part])
    compilers.wait()
    for each in folder.iterdir():
        os.replace(each, _WORK / each.name)
    return objects


def _object(target: Target, unit: str, version: bytes) -> Path:
    """Where a compiled unit is kept: another place for each of what it is made from."""
    folder = _PACKAGE / target.library.folder
    digest = hashlib.sha256(version + repr(target.flags).encode())
    for path in (folder / unit, *sorted(folder.glob("*.h"))):
        digest.update(path.read_bytes())
    return _WORK / f"{Path(unit).stem}-{target.level.name}-{digest.hexdigest()[:16]}.o"


def _link(
    compiler: str, compilers: Compilers, target: Target, objects: list[str], folder: Path
) -> None:
    stamp = folder / f"{target.path.stem}.cpp"
    stamp.write_text(f'extern "C" const char kvmesh_sources[] = "{target.digest}";\n')
    made = folder / target.path.name
    compilers.start([compiler, *target.flags, "-shared", str(stamp), *objects, "-o", str(made)])
    compilers.wait()
    target.path.parent.mkdir(parents=True, exist_ok=True)
    # Whoever has the old one loaded keeps it.
    part = target.path.with_suffix(".part")
    try:
        shutil.copyfile(made, part)
        os.replace(part, target.path)
    finally:
        part.unlink(missing_ok=True)


def _make_room(kept_days: float = 7.0) -> None:
    """Compiled units of other versions go when nobody has made them for some days."""
    too_old = time.time() - kept_days * 86400
    for path in _WORK.glob("*.o"):
        if path.stat().st_mtime < too_old:
            path.unlink()


@contextlib.contextmanager
def _alone(say: Say) -> Iterator[None]:
    """While no other process builds here; what one that was killed left is removed."""
    _WORK.mkdir(parents=True, exist_ok=True)
    with (_WORK / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process builds native kernels; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in _WORK.glob("part-*"):
            shutil.rmtree(left)
        yield


@contextlib.contextmanager
def _ended_by_signals(compilers: Compilers) -> Iterator[None]:
    """Signals that end a process end it in the usual order, so that compilers end as well."""
    before = [signal.signal(each, compilers.end_by) for each in _ENDING]
    try:
        yield
    finally:
        for each, handler in zip(_ENDING, before, strict=True):
            signal.signal(each, handler)


def say_on_terminal(text: str) -> None:
    """A line that changes on a terminal, elsewhere one after the other."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\r\033[K{text}")
    else:
        sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Builds; 3 if there is no compiler, or it refused, which is said."""
    parser = argparse.ArgumentParser(description="Builds the C++ libraries beside their sources.")
    parser.add_argument(
        "--levels",
        choices=("best", "usable", "all"),
        default="usable",
        help="the one that this CPU uses, those that it can run, or all of its kind of machine",
    )
    usable = usable_levels()
    levels = {"best": usable[:1], "usable": usable, "all": machine_levels()}[
        parser.parse_args(argv).levels
    ]
    try:
        made = build(targets(_PACKAGE, levels), say_on_terminal)
    except BuildError as error:
        print(f"\nnative kernels were not built, and workers are slower:\n{error}", file=sys.stderr)
        return 3
    finally:
        if sys.stdout.isatty():
            print()
    return 0 if made else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
