"""Typed access to parsed JSON; errors name the path of the wrong entry.

Tests: tests/unit/sim/test_profile.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a JSON document.

    Attributes:
        path: its path in the document, for messages.
    """

    data: Mapping[str, Any]
    path: str

    def has(self, key: str) -> bool:
        """Whether the object has an entry `key`."""
        return key in self.data

    def child(self, key: str) -> Fields:
        """Returns an object within this one."""
        return Fields(self._get(key, dict), f"{self.path}.{key}")

    def children(self, key: str) -> dict[str, Fields]:
        """Returns the objects within an object, by name."""
        inside = self.child(key)
        return {name: inside.child(name) for name in inside.data}

    def number(self, key: str, least: float = 0.0) -> float:
        """Returns a number of at least `least`."""
        value = self._get(key, (int, float))
        if isinstance(value, bool) or value < least:
            raise ConfigError(f"{self.path}.{key}: {value!r} is not a number of at least {least}")
        return float(value)

    def count(self, key: str, least: int = 0) -> int:
        """Returns a whole number of at least `least`."""
        value = self.number(key, least)
        if value != int(value):
            raise ConfigError(f"{self.path}.{key}: {value!r} is not a whole number")
        return int(value)

    def text(self, key: str) -> str:
        """Returns a string."""
        return str(self._get(key, str))

    def array(self, key: str) -> list[Any]:
        """Returns an array, whose entries the caller checks."""
        return list(self._get(key, list))

    def only(self, *keys: str) -> None:
        """Raises ConfigError if there is an entry with another name."""
        unknown = sorted(set(self.data) - set(keys))
        if unknown:
            raise ConfigError(f"{self.path}: unknown {', '.join(unknown)}")

    def _get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        if key not in self.data:
            raise ConfigError(f"{self.path}: {key} is missing")
        value = self.data[key]
        if not isinstance(value, kind):
            raise ConfigError(f"{self.path}.{key}: {value!r} has the wrong type")
        return value
