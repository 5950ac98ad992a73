"""A folder beside temporary files that is this user's alone and outlives the process.

What is found there is trusted: code is loaded from it, and peers who meet there let each other into
their memory. Tests: tests/unit/core/test_own_folder.py.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def own_temporary_folder() -> Path:
    """The folder, made now if it is not there.

    Raises:
        OSError: it cannot be made, or somebody else was first, or may enter it.
    """
    folder = Path(tempfile.gettempdir()) / f"kvmesh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(f"{folder} is not this user's alone")
    return folder
