"""A worker's Unix socket, where peers of the same user and host find it.

All lie in one folder that only this user may enter: who comes is let into a worker's memory. One
that was killed leaves its socket there; the next to start removes what nobody listens at.
Tests: tests/integration/test_host_socket.py.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from kvmesh.core.own_folder import own_temporary_folder
from kvmesh.transfer.sockets import listen_local


def listen_on_host(host: str) -> tuple[socket.socket, Path]:
    """A listening socket and where it is reached; whoever closes it unlinks the path.

    Args:
        host: identity of this host in this boot: other hosts may have the same temporary folder.

    Raises:
        OSError: the folder cannot be had, or its path is too long for a socket.
    """
    folder = own_temporary_folder()
    for left in folder.glob(f"data-{host[:8]}-*.sock"):
        _remove_if_dead(left)
    path = folder / f"data-{host[:8]}-{secrets.token_hex(6)}.sock"
    # Another worker that starts takes what does not listen yet for what listens no longer.
    unborn = path.with_suffix(".new")
    listener = listen_local(str(unborn))
    try:
        unborn.rename(path)
    except OSError:
        listener.close()
        raise
    return listener, path


def _remove_if_dead(path: Path) -> None:
    """A socket is refused as soon as no process has it, in whatever container that ran."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:  # gone by now, or too many ask at once
            return
