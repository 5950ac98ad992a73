"""A pytest plugin: the C++ libraries are those that scripts/sanitize_native.py builds."""

from __future__ import annotations

import functools
from pathlib import Path

from kvmesh.core import native_libraries
from kvmesh.core.native_libraries import NativeLibrary
from scripts.sanitize_native import FOLDER

_find = native_libraries.find_library


@functools.wraps(_find)
def _sanitized(
    wanted: NativeLibrary, level: str | None = None, package: Path | None = None
) -> tuple[Path, str]:
    """Also where a test looks elsewhere for one that is not there, none is found."""
    is_usual = package is None or (package / wanted.folder / "__init__.py").is_file()
    return _find(wanted, level, FOLDER if is_usual else package or FOLDER)


native_libraries.find_library = _sanitized
