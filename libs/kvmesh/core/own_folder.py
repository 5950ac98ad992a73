"""A folder among the temporary files that only this user may enter and that outlives the process.

Its files are trusted: code is loaded from it, and processes that meet there share their memory.
Tests: tests/unit/core/test_own_folder.py.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def own_temporary_folder() -> Path:
    """Returns the folder; creates it if it does not exist.

    Raises:
        OSError: it cannot be created, or another user owns it or may enter it.
    """
    folder = Path(tempfile.gettempdir()) / f"kvmesh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(f"{folder} is not this user's alone")
    return folder
