"""A worker's Unix socket, in a folder where peers of the same user and host find it.

Only this user may enter the folder, since a connected peer gets access to a worker's memory. A
killed worker leaves its socket file there; the next worker that starts removes files without a
listener.
Tests: tests/integration/test_host_socket.py.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from kvmesh.core.own_folder import own_temporary_folder
from kvmesh.transfer.sockets import listen_local


def listen_on_host(host: str) -> tuple[socket.socket, Path]:
    """Opens a listening socket; returns it and its path, which the closer must unlink.

    Args:
        host: identity of this host in this boot: other hosts may have the same temporary folder.

    Raises:
        OSError: the folder is unusable, or its path is too long for a socket.
    """
    folder = own_temporary_folder()
    for left in folder.glob(f"data-{host[:8]}-*.sock"):
        _remove_if_dead(left)
    path = folder / f"data-{host[:8]}-{secrets.token_hex(6)}.sock"
    # Another starting worker would remove a path that does not listen yet as dead.
    unborn = path.with_suffix(".new")
    listener = listen_local(str(unborn))
    try:
        unborn.rename(path)
    except OSError:
        listener.close()
        raise
    return listener, path


def _remove_if_dead(path: Path) -> None:
    """Removes a socket file that refuses connections: no process, in any container, has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:  # removed meanwhile, or its queue of connections is full
            return
