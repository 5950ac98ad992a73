"""The folder that the processes of one gateway share; folders of killed gateways are removed.

Its owner locks a file in it, and the kernel releases the lock when the owner dies.
Tests: tests/unit/gateway/test_process_folder.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "kvmesh-gateway-"
_OWNER = "owner"


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Makes a folder for the duration of the block. First removes folders of dead owners."""
    _remove_left()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # Renamed only after it is locked, so that no other gateway takes it for a dead owner's.
        with (folder / f"{_OWNER}.new").open("w") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            (folder / f"{_OWNER}.new").rename(folder / _OWNER)
            yield folder


def _remove_left() -> None:
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError):  # another user's, or a locked one
            held = os.open(owner, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(held).st_uid == os.getuid():
                    shutil.rmtree(owner.parent, ignore_errors=True)
            finally:
                os.close(held)
