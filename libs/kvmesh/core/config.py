"""Configuration of services: defaults < TOML file < environment < command line.

A config is a frozen dataclass whose fields are str, int, float, bool, `X | None` or another such
dataclass. Field `section.name` has the flag `--section.name` and the environment variable
`KVMESH_SECTION__NAME`. A `secret` has no flag, because every user of a machine can read command
lines. The help text is the field's `metadata["help"]`. A number below 0 is an error unless the
default is below 0 too; a `positive` field must be above 0. An unknown key is an error. In the
environment, which services share, it is one only within a section of this service, and only if no
service has that option (`core/shared_sections.py`).
This is the only module that reads the environment. Tests: tests/unit/core/test_config.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvmesh.core.errors import ConfigError
from kvmesh.core.shared_sections import SHARED_OPTIONS
from kvmesh.core.text_files import UNREADABLE, why_unreadable

ConfigT = TypeVar("ConfigT")

ENV_PREFIX = "KVMESH_"

_LAST_PORT = 65_535
_KIND_NOUNS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


_LIKE = 0.8
"""Minimum similarity ratio (`difflib`) of a mistyped name to the suggested one."""

_UNRECOGNIZED = "unrecognized arguments: "
"""Start of argparse's message about an unknown flag."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line that points to `--help`."""

    def error(self, message: str) -> NoReturn:
        """Prints the line and exits with code 2 for wrong usage."""
        meant = self._meant(message) if message.startswith(_UNRECOGNIZED) else ""
        self.exit(2, f"{self.prog}: {message}{meant or f'; see `{self.prog} --help`'}\n")

    def _meant(self, message: str) -> str:
        """Returns a suggestion for the first unknown flag; empty if none is similar."""
        first = message.removeprefix(_UNRECOGNIZED).split()[0].partition("=")[0]
        return nearest(first, self._option_string_actions)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean" with the most similar known name; empty if none is similar."""
    # A common prefix would make all names similar.
    bare = {each.removeprefix("--").removeprefix(ENV_PREFIX): each for each in sorted(known)}
    word = name.removeprefix("--").removeprefix(ENV_PREFIX)
    near = difflib.get_close_matches(word, bare, n=1, cutoff=_LIKE)
    return f"; did you mean {bare[near[0]]}?" if near else ""


_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def option(default: Any, help_text: str) -> Any:
    """Returns a config field with a default and a help text."""
    if dataclasses.is_dataclass(default) and isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata={"help": help_text})
    return dataclasses.field(default=default, metadata={"help": help_text})


def positive(default: float, help_text: str) -> Any:
    """Returns a config field for a number above 0."""
    return dataclasses.field(default=default, metadata={"help": help_text, "positive": True})


def secret(help_text: str) -> Any:
    """Returns a text field that is never printed and is read only from a file or the
    environment.
    """
    return dataclasses.field(default="", metadata={"help": help_text, "secret": True})


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One settable leaf of a config."""

    path: tuple[str, ...]
    kind: Any
    default: Any
    help: str
    is_secret: bool = False
    is_positive: bool = False

    @property
    def flag(self) -> str:
        """Name on the command line; empty for a secret."""
        return "" if self.is_secret else "--" + ".".join(self.path).replace("_", "-")

    @property
    def env(self) -> str:
        """Name in the environment."""
        return ENV_PREFIX + "__".join(self.path).upper()


def options_of(config: type[Any]) -> list[Option]:
    """Returns all leaves of a config class, in order."""
    return list(_leaves(config, ()))


def _leaves(config: type[Any], path: tuple[str, ...]) -> Iterator[Option]:
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        kind = hints[field.name]
        here = (*path, field.name)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from _leaves(kind, here)
            continue
        if field.default is dataclasses.MISSING:
            raise TypeError(f"{config.__name__}.{field.name} needs a default")
        facts = field.metadata
        yield Option(
            here,
            kind,
            field.default,
            facts.get("help", ""),
            is_secret=bool(facts.get("secret")),
            is_positive=bool(facts.get("positive")),
        )


def _parse(option: Option, raw: Any, origin: str) -> Any:
    kind, optional = option.kind, False
    if isinstance(kind, types.UnionType):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        kind, optional = members[0], True
    if optional and raw in (None, ""):
        return None
    try:
        if kind is bool:
            return _parse_bool(raw)
        if kind is str and not isinstance(raw, (dict, list)):
            return str(raw)
        if kind in (int, float):
            return _in_range(option, _number(kind, raw), origin)
    except (TypeError, ValueError, OverflowError):
        pass
    name = _KIND_NOUNS.get(kind, str(kind))
    raise ConfigError(f"{origin}: {'.'.join(option.path)} must be {name}, got {raw!r}")


def _number(kind: Any, raw: Any) -> Any:
    value = kind(raw)
    if isinstance(raw, bool) or math.isnan(value) or (isinstance(raw, float) and value != raw):
        raise ValueError(raw)  # a number in a file is not rounded
    return value


def _in_range(option: Option, value: Any, origin: str) -> Any:
    name = ".".join(option.path)
    if option.path[-1] == "port" or option.path[-1].endswith("_port"):
        # A listener would silently use the port modulo 65,536.
        if not -1 <= value <= _LAST_PORT:
            raise ConfigError(f"{origin}: {name}: {value} is not a port")
        return value
    lowest = min(option.default or 0, 0)
    if value < lowest:
        raise ConfigError(f"{origin}: {name} must be at least {lowest:g}, got {value:g}")
    if option.is_positive and not value:
        raise ConfigError(f"{origin}: {name} must be more than 0")
    return value


def _parse_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(raw)
    return word in _TRUE


def _flatten(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        here = (*path, key)
        if isinstance(value, dict):
            yield from _flatten(value, here)
        else:
            yield ".".join(here), value


def _build(config: type[Any], values: Mapping[tuple[str, ...], Any], path: tuple[str, ...]) -> Any:
    hints = typing.get_type_hints(config)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        here = (*path, field.name)
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            arguments[field.name] = _build(kind, values, here)
        elif here in values:
            arguments[field.name] = values[here]
    return config(**arguments)


def load_config(
    config: type[ConfigT],
    argv: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    prog: str = "kvmesh",
) -> ConfigT:
    """Builds a config from all its sources.

    Raises:
        ConfigError: a key is unknown or a value has the wrong type; the message names the source.
    """
    environ = os.environ if environ is None else environ
    options = options_of(config)
    parser = OneLineParser(
        prog=prog, description=(config.__doc__ or "").strip(), allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file (env KVMESH_CONFIG)")
    parser.add_argument("--print-config", action="store_true", help="print the result and exit")
    for leaf in options:
        if leaf.is_secret:
            continue
        text = f"{leaf.help} (default {leaf.default!r}, env {leaf.env})".replace("%", "%%")
        parser.add_argument(leaf.flag, dest=".".join(leaf.path), metavar="VALUE", help=text)
    arguments = vars(parser.parse_args(list(argv)))

    by_name = {".".join(leaf.path): leaf for leaf in options}
    values: dict[tuple[str, ...], Any] = {}
    file = arguments["config"] or environ.get("KVMESH_CONFIG")
    if file:
        for name, raw in _flatten(_read_toml(Path(file))):
            if name not in by_name:
                raise ConfigError(f"{file}: unknown key {name}{nearest(name, by_name)}")
            values[by_name[name].path] = _parse(by_name[name], raw, file)
    _check_environment(options, environ)
    for name, leaf in by_name.items():
        if leaf.env in environ:
            values[leaf.path] = _parse(leaf, environ[leaf.env], leaf.env)
        if arguments.get(name) is not None:
            values[leaf.path] = _parse(leaf, arguments[name], leaf.flag)
    result: ConfigT = _build(config, values, ())
    if arguments["print_config"]:
        sys.stdout.write(format_config(result))
        parser.exit(0)
    return result


def _check_environment(options: Sequence[Option], environ: Mapping[str, str]) -> None:
    sections = {leaf.env.partition("__")[0] + "__" for leaf in options if "__" in leaf.env}
    known = {leaf.env for leaf in options}
    for name in environ:
        section, separator, _ = name.partition("__")
        if section + separator in sections and name not in known | SHARED_OPTIONS:
            raise ConfigError(f"{name}: no such option{nearest(name, known)}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UNREADABLE as error:
        raise ConfigError(f"{path}: cannot be read: {why_unreadable(error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def format_config(config: Any) -> str:
    """Returns the config as TOML-like lines with masked secrets."""
    lines: list[str] = []

    def walk(value: Any, path: tuple[str, ...]) -> None:
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if dataclasses.is_dataclass(inner):
                walk(inner, (*path, field.name))
                continue
            shown = (
                "***" if inner and field.metadata.get("secret") else without_password(repr(inner))
            )
            lines.append(f"{'.'.join((*path, field.name))} = {shown}")

    walk(config, ())
    return "\n".join(lines) + "\n"


def without_password(text: str) -> str:
    """Returns a text with the password of each URL masked, to show to people."""
    return re.sub(r"(://[^/:@\s]*:)[^/\s]*@", r"\1***@", text)


def environment(name: str, default: str = "") -> str:
    """Returns an environment variable, for values that are not part of a service's config."""
    return os.environ.get(name, default)


def own_environment() -> dict[str, str]:
    """Returns all environment variables that begin with `KVMESH_`."""
    return {name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)}


def default_environment(values: Mapping[str, str]) -> None:
    """Sets variables that are not set yet, for a library that reads them when it is loaded."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment with additions, for a child process."""
    return {**os.environ, **extra}
