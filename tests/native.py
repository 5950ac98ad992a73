"""Marks of tests that need the C++ libraries, or a compiler."""

from __future__ import annotations

import pytest

from kvmesh.core.native_libraries import HOST, TRANSFER, NativeError, NativeLibrary, load_library
from scripts.build_native import find_compiler


def _why_not(library: NativeLibrary) -> str:
    try:
        load_library(library)
    except NativeError as error:
        return str(error)
    return ""


def _needs(library: NativeLibrary) -> pytest.MarkDecorator:
    reason = _why_not(library)
    return pytest.mark.skipif(bool(reason), reason=reason or "it is there")


needs_host_library = _needs(HOST)
needs_transfer_library = _needs(TRANSFER)
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
