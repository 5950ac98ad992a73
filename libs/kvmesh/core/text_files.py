"""Words for why a text file cannot be read. Tests: tests/unit/core/test_text_files.py."""

from __future__ import annotations

UNREADABLE = (OSError, UnicodeDecodeError)
"""The errors that `Path.read_text` raises."""


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Returns the reason in a few words, for a message that names the file."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    return error.strerror or str(error)
