"""The folder that the processes of one gateway share, and what a killed gateway leaves of its own.

Its owner holds a lock on a file in it, which the kernel lets go when the owner dies, however it
does. Tests: tests/unit/gateway/test_process_folder.py.
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
    """A folder until the end of the block; those of owners that were killed are removed first."""
    _remove_left()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # Under its name only when it is locked: nobody may take it for one that was left.
        with (folder / f"{_OWNER}.new").open("w") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            (folder / f"{_OWNER}.new").rename(folder / _OWNER)
            yield folder


def _remove_left() -> None:
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError):  # another user's, or one that is locked
            held = os.open(owner, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(held).st_uid == os.getuid():
                    shutil.rmtree(owner.parent, ignore_errors=True)
            finally:
                os.close(held)
