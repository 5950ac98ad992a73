"""Command-line flags with environment variables: `--num-blocks` is `KVMESH_NUM_BLOCKS`.

Tests: tests/unit/cli/test_flags.py.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvmesh.core.config import ENV_PREFIX, OneLineParser, environment

T = TypeVar("T")

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}
_METAVARS: dict[type, str] = {int: "N", float: "NUMBER"}
_NOUNS: dict[object, str] = {int: "a whole number", float: "a number"}

PICTURES = (".png", ".svg", ".pdf")
"""Suffixes of the files that a plot can be written to."""


def env_name(flag: str) -> str:
    """Returns the name of a flag's environment variable."""
    return ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def flag_twins(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Returns the environment variables of all flags of a parser."""
    flags = (flag for action in parser._actions for flag in action.option_strings)
    return frozenset(env_name(flag) for flag in flags if flag.startswith("--") and flag != "--help")


def new_parser(prog: str, description: str, epilog: str = "") -> OneLineParser:
    """Returns a parser that keeps the line breaks of its texts and accepts no abbreviations."""
    return OneLineParser(
        prog=prog,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_flag(
    parser: argparse.ArgumentParser,
    flag: str,
    default: Any,
    help_text: str,
    *,
    kind: Callable[[str], Any] = str,
    choices: Sequence[str] | None = None,
    metavar: str = "",
) -> None:
    """Adds a flag with a value; a value from the environment is parsed and checked in the same way.

    Args:
        metavar: placeholder of the value in the help; empty: derived from the default's type.
    """
    raw = environment(env_name(flag))
    shown = "" if default in (None, "") else f"default {default}, "
    parser.add_argument(
        flag,
        type=_told(kind),
        default=default,
        choices=choices,
        metavar=None if choices else metavar or _METAVARS.get(type(default), "VALUE"),
        help=f"{help_text} ({shown}env {env_name(flag)})".replace("%", "%%"),
    )
    if raw:
        parser.set_defaults(**{_dest(flag): _parse(parser, flag, raw, kind, choices)})


def _parse(
    parser: argparse.ArgumentParser,
    flag: str,
    raw: str,
    kind: Callable[[str], Any],
    choices: Sequence[str] | None,
) -> Any:
    try:
        value = _told(kind)(raw)
    except argparse.ArgumentTypeError as error:
        parser.error(f"{env_name(flag)}: {error}")
    if choices is not None and value not in choices:
        parser.error(f"{env_name(flag)}: {raw!r} is not one of {', '.join(choices)}")
    return value


def add_switch(parser: argparse.ArgumentParser, flag: str, help_text: str) -> None:
    """Adds a flag without a value; its environment variable is true or false."""
    raw = environment(env_name(flag)).lower()
    if raw not in _TRUE | _FALSE:
        parser.error(f"{env_name(flag)}: {raw!r} is neither true nor false")
    parser.add_argument(
        flag,
        action="store_true",
        default=raw in _TRUE,
        help=f"{help_text} (env {env_name(flag)})",
    )


def add_list(parser: argparse.ArgumentParser, flag: str, help_text: str, metavar: str) -> None:
    """Adds `flag VALUE...`; its environment variable is split at blanks."""
    parser.add_argument(
        flag,
        nargs="*",
        default=environment(env_name(flag)).split(),
        metavar=metavar,
        help=f"{help_text} (env {env_name(flag)})",
    )


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _told(kind: Callable[[str], T]) -> Callable[[str], T]:
    """Returns `kind` with errors that are sentences for people."""

    def parse(raw: str) -> T:
        try:
            return kind(raw)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{raw!r} is not {_NOUNS.get(kind, 'valid')}") from (
                error
            )

    return parse


def positive_int(raw: str) -> int:
    """Parses a whole number of at least 1."""
    value = _whole(raw)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def count(raw: str) -> int:
    """Parses a whole number of at least 0."""
    value = _whole(raw)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def port_number(raw: str) -> int:
    """Parses a TCP port; 0 picks a free one."""
    value = _whole(raw)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"{value} is not a port")
    return value


def positive(raw: str) -> float:
    """Parses a number above 0, such as a duration."""
    value = _finite(raw)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{raw} is not above 0")
    return value


def not_negative(raw: str) -> float:
    """Parses a number of at least 0, such as a rate."""
    value = _finite(raw)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{raw} is less than 0")
    return value


def output_file(raw: str) -> str:
    """Checks that a file can be written, before long work that would lose its result; or empty."""
    path = Path(raw)
    if raw and path.is_dir():
        raise argparse.ArgumentTypeError(f"{raw} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {path.parent} does not exist; make it first")
    return raw


def picture_file(raw: str) -> str:
    """Checks an `output_file` that a plot can be written to; or empty."""
    if raw and Path(raw).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{raw} does not end in {', '.join(PICTURES)}")
    return output_file(raw)


_whole = _told(int)


def _finite(raw: str) -> float:
    value = _told(float)(raw)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{raw!r} is not a number")
    return value


def command_words(raw: str) -> tuple[str, ...]:
    """Splits a command line as a shell does; an empty one has no words."""
    try:
        return tuple(shlex.split(raw))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{raw!r}: {error}") from error
