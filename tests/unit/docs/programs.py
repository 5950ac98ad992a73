"""What the programs that the documents name accept; a check returns what is wrong, or nothing."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import yaml

from kvmesh.cli.__main__ import COMMANDS
from kvmesh.cli.__main__ import main as kvmesh_main
from kvmesh.core.config import load_config, options_of
from kvmesh.core.errors import ConfigError
from scripts.gen_config_docs import SERVICES
from services.gateway.api.embeddings import EmbeddingBody
from services.gateway.api.schema import ChatBody, CompletionBody
from tests.unit.docs.documents import ROOT
from tests.unit.docs.shell import Command

_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_VERB = re.compile(r"^([a-z0-9-]+):.*## ", re.MULTILINE)
_RECIPE = r"^{verb}:.*\n((?:\t.*\n)+)"
_MODULE = re.compile(r"\$\((?:VLLM_)?PY\) -m ([a-z_.]+)[^']*\$\(ARGS\)")
_ADDED = re.compile(r'f?"(--[a-z{][^"]*)"')
_OURS = ("services", "kvmesh", "benchmarks", "scripts", "models", "tests")
_OTHERS = {"pytest"}
_OF_EVERY_SERVICE = {"--config", "--print-config", "--help"}
_ACTIONS = {"fleet": ("list", "drain"), "group": ("list", "scale", "upgrade")}
_FOLDERS = re.compile(r"(?:deploy|models|tests|scripts|libs|protos|services)/[\w./-]+")
_BODIES: dict[str, type[ChatBody | CompletionBody | EmbeddingBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
}


class _ParsedError(Exception):
    """The arguments were accepted; what would follow is not run."""


@contextlib.contextmanager
def _only_parsing() -> Iterator[None]:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, args: Sequence[str] | None = None) -> None:
        parse(self, args)
        raise _ParsedError

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop):
        yield


def wrong_in(command: Command) -> str:
    """What is wrong with a command; empty if it can be typed as it stands."""
    name = command.program.rpartition("/")[2]
    wrong = _CHECKS[name](command) if name in _CHECKS else ""
    missing = [path for path in _paths(command) if not (ROOT / path).exists()]
    return wrong or (f"no such file: {', '.join(missing)}" if missing else "")


def _paths(command: Command) -> list[str]:
    return [word for word in command.words[1:] if _FOLDERS.fullmatch(word)]


def _kvmesh(command: Command, words: Sequence[str] | None = None) -> str:
    words = command.words[1:] if words is None else words
    if not words:
        return ""
    if words[0] not in COMMANDS and not words[0].startswith("-"):
        return f"there is no command {words[0]}"
    if not command.is_whole:
        return _unknown(words, flags_of_command(words[0])) if words[0] in COMMANDS else ""
    try:
        with _only_parsing():
            code = kvmesh_main(words)
    except _ParsedError:
        return ""
    except SystemExit as error:
        return f"exit code {error.code}"
    return f"exit code {code}" if code else ""


@cache
def flags_of_command(name: str) -> frozenset[str]:
    """All flags of a `kvmesh` command, as its help and those of its actions show them."""
    shown = io.StringIO()
    actions = [[action] for action in _ACTIONS.get(name, ())]
    for words in ([], *actions):
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            kvmesh_main([name, *words, "--help"])
    return frozenset(_FLAG.findall(shown.getvalue()))


def _unknown(words: Sequence[str], known: Set[str]) -> str:
    used = [word for word in words if word.startswith("--")]
    return ", ".join(f"no flag {flag}" for flag in used if flag not in known)


def _python(command: Command) -> str:
    words = command.words[1:]
    if words[:1] != ("-m",):
        return ""
    module, rest = words[1], words[2:]
    if module == "kvmesh.cli":
        return _kvmesh(command, rest)
    package, _, name = module.partition(".")
    if package not in _OURS:
        return "" if module in _OTHERS or not command.is_whole else f"whose module is {module}?"
    if package == "services" and command.is_whole:
        return _service(name, rest)
    if not name:  # a placeholder follows
        return ""
    if importlib.util.find_spec(module) is None:
        return f"no module {module}"
    if package == "services":
        return _unknown(
            rest, {leaf.flag for leaf in options_of(SERVICES[name])} | _OF_EVERY_SERVICE
        )
    return _flags_of_source(module, rest)


def _service(name: str, words: Sequence[str]) -> str:
    try:
        load_config(SERVICES[name], words, environ={})
    except ConfigError as error:
        return str(error)
    except SystemExit as error:
        return f"exit code {error.code}" if error.code else ""
    return ""


def _flags_of_source(module: str, words: Sequence[str]) -> str:
    """Benchmarks and scripts import far more than their parsers: their source is read instead."""
    place = ROOT / module.replace(".", "/")
    file = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
    source = file.read_text()
    known = [re.sub(r"\{[^}]*\}", r"[a-z-]+", flag) for flag in _ADDED.findall(source)]
    used = [word for word in words if word.startswith("--")]
    unknown = [flag for flag in used if not any(re.fullmatch(each, flag) for each in known)]
    return ", ".join(f"{module} has no {flag}" for flag in unknown)


@cache
def _makefile() -> str:
    return (ROOT / "Makefile").read_text()


def _make(command: Command) -> str:
    verbs = set(_VERB.findall(_makefile()))
    for word in command.words[1:]:
        name, given, value = word.partition("=")
        if not given:
            if name not in verbs:
                return f"no verb {name}"
        elif not re.search(rf"^{name} \?=", _makefile(), re.MULTILINE):
            return f"no variable {name}"
        elif name == "ARGS" and (wrong := _arguments_of_verb(command.words[1], value)):
            return wrong
    return ""


def _arguments_of_verb(verb: str, arguments: str) -> str:
    recipe = re.search(_RECIPE.format(verb=re.escape(verb)), _makefile(), re.MULTILINE)
    if recipe is None or not (module := _MODULE.search(recipe[1])):
        return f"make {verb} takes no ARGS"
    return _flags_of_source(module[1], shlex.split(arguments))


def _docker(command: Command) -> str:
    if command.words[1] != "compose":
        return f"docker {command.words[1]} is not used here"
    stack = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    profiles = {
        name for service in stack["services"].values() for name in service.get("profiles", ())
    }
    words = iter(command.words[2:])
    for word in words:
        if word == "--profile":
            if (profile := next(words, "")) not in profiles:
                return f"no profile {profile}"
        elif word not in {"up", "build", "--build", "down", "--volumes"}:
            return f"docker compose {word} is not used here"
    names = {variable.partition("=")[0] for variable in command.variables}
    unknown = {
        name for name in names if f"${{{name}" not in (ROOT / "docker-compose.yml").read_text()
    }
    return f"docker-compose.yml does not read {', '.join(unknown)}" if unknown else ""


def _helm(command: Command) -> str:
    names = [word.partition("=")[0] for flag, word in pairwise(command.words) if flag == "--set"]
    return ", ".join(f"no value {name}" for name in names if name not in chart_values())


@cache
def chart_values() -> frozenset[str]:
    """Names of the Helm chart's values, with a dot for each level."""

    def names(tree: Any, before: str) -> Iterator[str]:
        for key, value in tree.items() if isinstance(tree, dict) else ():
            yield f"{before}{key}"
            yield from names(value, f"{before}{key}.")

    values = yaml.safe_load((ROOT / "deploy/helm/kvmesh/values.yaml").read_text())
    return frozenset(names(values, ""))


def _pip(command: Command) -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {name for word in command.words for name in re.findall(r"^\.\[([\w,]+)\]$", word)}
    unknown = {name for each in named for name in each.split(",")} - set(extras)
    return f"no extra {', '.join(unknown)}" if unknown else ""


def _curl(command: Command) -> str:
    words = command.words
    paths = [urlsplit(word).path for word in words if word.startswith("http://")]
    for path in paths:
        if path not in served_paths():
            return f"nobody serves {path}"
    for before, word in pairwise(words):
        if before == "-d":
            _BODIES[paths[0]].model_validate(json.loads(word))
    return ""


@cache
def served_paths() -> frozenset[str]:
    """HTTP paths of the gateway and of admin ports, as the sources name them."""
    files = [
        *(ROOT / "services").rglob("*.py"),
        *(ROOT / "libs/kvmesh/runtime").glob("admin*.py"),
        *(ROOT / "libs/kvmesh/console").glob("*.py"),
    ]
    return frozenset(
        path for file in files for path in re.findall(r'"(/[a-z0-9/_.{}-]+)"', file.read_text())
    )


_CHECKS: dict[str, Callable[[Command], str]] = {
    "kvmesh": _kvmesh,
    "python": _python,
    "make": _make,
    "docker": _docker,
    "helm": _helm,
    "pip": _pip,
    "curl": _curl,
}
