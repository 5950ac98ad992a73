"""Parses options that are lists of NAME=VALUE. Tests: tests/unit/core/test_named_values.py."""

from __future__ import annotations

from kvmesh.core.errors import ConfigError


def named_values(text: str, option: str, form: str) -> dict[str, str]:
    """Parses a comma-separated list of NAME=VALUE and keeps its order.

    Args:
        option: name of the option, for errors.
        form: description of an entry, for errors.

    Raises:
        ConfigError: the list is malformed, or a name occurs twice.
    """
    found: dict[str, str] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in each.partition("="))
        if not (name and value):
            raise ConfigError(f"{option} is {form}, comma-separated; got {each!r}")
        if name in found:
            raise ConfigError(f"{option} is {form}, comma-separated; {name} appears twice")
        found[name] = value
    return found
