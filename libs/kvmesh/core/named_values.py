"""Parses options that are lists: of words, of NAME=VALUE or of NAME=NUMBER.

Tests: tests/unit/core/test_named_values.py.
"""

from __future__ import annotations

from kvmesh.core.errors import ConfigError


def listed(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list and keeps its order; empty entries are left out."""
    return tuple(word for part in text.split(",") if (word := part.strip()))


def named_values(text: str, option: str, form: str) -> dict[str, str]:
    """Parses a comma-separated list of NAME=VALUE and keeps its order.

    Args:
        option: name of the option, for errors.
        form: description of an entry, for errors.

    Raises:
        ConfigError: the list is malformed, or a name occurs twice.
    """
    found: dict[str, str] = {}
    for each in listed(text):
        name, _, value = (part.strip() for part in each.partition("="))
        if not (name and value):
            raise ConfigError(f"{option} is {form}, comma-separated; got {each!r}")
        if name in found:
            raise ConfigError(f"{option} is {form}, comma-separated; {name} appears twice")
        found[name] = value
    return found


def named_numbers(text: str, option: str, form: str) -> dict[str, int]:
    """Parses a comma-separated list of NAME=NUMBER with whole numbers above 0.

    Args and errors are those of `named_values`; another number is an error, too.
    """
    found = named_values(text, option, form)
    for name, value in found.items():
        if not (value.isdecimal() and int(value)):
            raise ConfigError(f"{option} is {form}; got {name}={value}")
    return {name: int(value) for name, value in found.items()}
