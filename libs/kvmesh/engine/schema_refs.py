"""The objects of a JSON schema, and the targets of references within it. Pure.

Tests: tests/unit/engine/test_schema_refs.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_POINTER = re.compile(r"#(/[^%]*)?")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_IDS = ("$id", "id")


class References:
    """The references of one document.

    A part with an `$id` of its own is a document of its own for the references in it. No reference
    of a document with such parts is followed here, and none with escaped characters.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._is_one = not _has_parts(root)

    def target(self, ref: Any) -> tuple[bool, Any]:
        """Returns the target of a reference; False if it is not a pointer within the document."""
        if not isinstance(ref, str) or not _POINTER.fullmatch(ref) or not self._is_one:
            return False, None
        value = self._root
        for step in ref.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and _INDEX.fullmatch(name) and int(name) < len(value):
                value = value[int(name)]
            else:
                return False, None
        return True, value


def objects_of(root: Any) -> Iterator[dict[str, Any]]:
    """Yields all objects of a document, itself included."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            yield value
            waiting += value.values()


def _has_parts(root: Any) -> bool:
    """Returns whether a document has inner parts with ids."""
    return any(
        part is not root and isinstance(part.get(name), str)
        for part in objects_of(root)
        for name in _IDS
    )
