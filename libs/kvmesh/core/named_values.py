"""Options that are lists of NAME=VALUE. Tests: tests/unit/core/test_named_values.py."""

from __future__ import annotations

from kvmesh.core.errors import ConfigError


def named_values(text: str, option: str, form: str) -> dict[str, str]:
    """Reads such a list, comma-separated, in its order.

    Args:
        option: its name, for errors.
        form: what an entry looks like, for errors.

    Raises:
        ConfigError: it is malformed, or names one twice.
    """
    found: dict[str, str] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in each.partition("="))
        if not (name and value):
            raise ConfigError(f"{option} is {form}, comma-separated; got {each!r}")
        if name in found:
            raise ConfigError(f"{option} is {form}, comma-separated; the name {name} comes twice")
        found[name] = value
    return found
