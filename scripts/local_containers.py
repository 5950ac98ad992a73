"""Containers on a machine without a Docker engine and without an image registry.

Podman with runc, in a storage of its own under a cache folder, so that nothing else on the machine
is touched. A Debian folder made by debootstrap stands in for the Python and the Redis base image.
Tests: tests/unit/packaging/test_local_containers.py.
"""

from __future__ import annotations

import ast
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from kvmesh.core.config import child_environment

BASE_IMAGE = "localhost/kvmesh-e2e-base"
DEBIAN_RELEASE = "bookworm"
DEBIAN_PACKAGES = ("python3", "python3-venv", "redis-server")
TOOLS = {
    "podman": "podman netavark aardvark-dns catatonit",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "tar": "tar",
}
"""Program -> Debian packages that bring it and what it needs."""

_OUTPUT_LINES = 25

# Works without systemd, without CAP_SYS_RESOURCE, and with cgroups of either version.
_CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=8192:8192"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_config_dir = "{home}/networks"
"""
_STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{home}/storage"
runroot = "{home}/run"
"""


class CommandError(Exception):
    """A command failed or took too long; the message holds the end of its output."""


def missing_requirements() -> list[str]:
    """What this machine lacks, one line each; empty if containers can run."""
    lacking = [] if os.geteuid() == 0 else ["root: containers and debootstrap need it"]
    lacking += [
        f"{tool}: install it (Debian: apt-get install {packages})"
        for tool, packages in TOOLS.items()
        if shutil.which(tool) is None
    ]
    if compose_program() is None:
        lacking.append(f"podman-compose: install it ({sys.executable} -m pip install '.[dev]')")
    return lacking


def compose_program() -> str | None:
    """Path of podman-compose, from this interpreter's environment if it is there."""
    beside = Path(sys.executable).parent / "podman-compose"
    return str(beside) if beside.is_file() else shutil.which("podman-compose")


def run(
    argv: Sequence[str | Path],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Runs a command to its end and returns its standard output.

    Raises:
        CommandError: it failed or took longer than `timeout_s`.
    """
    command = [str(argument) for argument in argv]
    # A session of its own, so that what the command started can be ended with it.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=cwd,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{_short(command)}: not done after {timeout_s:.0f} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        lines = (output + errors).splitlines()[-_OUTPUT_LINES:]
        code = process.returncode
        raise CommandError("\n".join([f"{_short(command)}: exit code {code}", *lines]))
    return output


def _short(command: Sequence[str]) -> str:
    return " ".join(command[:6])


@dataclass(frozen=True, slots=True)
class PipSettings:
    """How pip finds packages on this machine, for a pip inside a build.

    Attributes:
        options: name -> value, as in the `[global]` section of pip.conf.
    """

    options: Mapping[str, str]

    @classmethod
    def parse(cls, listing: str) -> PipSettings:
        """Reads the output of `pip config list`; later sources win as they do in pip."""
        options: dict[str, str] = {}
        found = [line.partition("=") for line in listing.splitlines() if "=" in line]
        for section in ("global", "install", ":env:"):
            for key, _, value in found:
                if key.rpartition(".")[0] == section:
                    words = str(ast.literal_eval(value)).split()
                    options[key.rpartition(".")[2]] = " ".join(words)
        return cls(options)

    def config_file(self) -> str:
        """The text of a pip.conf."""
        rows = [f"{name} = {value}" for name, value in self.options.items()]
        return "\n".join(["[global]", *rows, ""])

    def local_paths(self) -> list[Path]:
        """Folders and files of this machine that the settings name, parents before children."""
        paths = {path for value in self.options.values() for path in _paths_in(value)}
        return [
            path
            for path in sorted(paths)
            if not any(other in paths for other in path.parents) and path != Path("/")
        ]


def _paths_in(value: str) -> Iterator[Path]:
    for word in value.split():
        url = urlparse(word)
        if url.scheme == "file":
            # Pages of an index name their files relative to it: ../../files/<wheel>.
            yield Path(unquote(url.path)).parent
        elif word.startswith("/"):
            yield Path(word)


class ContainerHost:
    """Podman with its own storage, networks and configuration.

    Args:
        home: folder that keeps images between runs.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._pip_conf = home / "pip.conf"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Writes podman's configuration and keeps other runs away; needed around all else.

        Raises:
            CommandError: another run goes on.
        """
        self._home.mkdir(parents=True, exist_ok=True)
        with self._file("lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CommandError(f"another run uses {self._home}") from error
            self._file("containers.conf").write_text(_CONTAINERS_CONF.format(home=self._home))
            self._file("storage.conf").write_text(_STORAGE_CONF.format(home=self._home))
            yield

    def _file(self, name: str) -> Path:
        return self._home / name

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """Environment for podman and for programs that call it."""
        return child_environment(
            {
                "CONTAINERS_CONF": str(self._file("containers.conf")),
                "CONTAINERS_STORAGE_CONF": str(self._file("storage.conf")),
                # Without systemd there are no timers; health checks are run by hand.
                "DISABLE_HC_SYSTEMD": "true",
                **extra,
            }
        )

    def podman(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """Runs podman and returns its output, without white space around it."""
        return run(["podman", *arguments], timeout_s, env=self.environment({})).strip()

    def has_image(self, name: str) -> bool:
        """Whether the storage holds this image."""
        return bool(self.podman("images", "--quiet", "--filter", f"reference={name}"))

    def image_bytes(self, name: str) -> int:
        """Size of an image in bytes."""
        return int(self.podman("image", "inspect", "--format", "{{.Size}}", name))

    def make_base_image(self) -> None:
        """Makes the stand-in for the base images from a fresh Debian folder."""
        folder = self._file("rootfs")
        archive = self._file("rootfs.tar")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            packages = f"--include={','.join(DEBIAN_PACKAGES)}"
            release = (DEBIAN_RELEASE, str(folder))
            run(["debootstrap", "--variant=minbase", packages, *release], timeout_s=900)
            run(["tar", "-C", folder, "--exclude=./var/cache/apt/*", "-cf", archive, "."], 300)
            self.podman("import", str(archive), BASE_IMAGE, timeout_s=300)
        finally:
            archive.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)

    def build_arguments(self) -> list[str]:
        """Flags of `podman build` that let pip inside reach what pip here reaches."""
        listing = run([sys.executable, "-m", "pip", "config", "list"], timeout_s=60)
        pip = PipSettings.parse(listing)
        self._pip_conf.write_text(pip.config_file())
        mounts = [f"{self._pip_conf}:/etc/pip.conf:ro"]
        mounts += [f"{path}:{path}:ro" for path in pip.local_paths() if path.exists()]
        flags = ["--isolation", "chroot", "--network", "host"]
        for mount in mounts:
            flags += ["--volume", mount]
        return flags
