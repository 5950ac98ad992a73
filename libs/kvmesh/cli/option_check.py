"""Checks the environment that `kvmesh up` passes to services, before they start.

Tests: tests/unit/cli/test_option_check.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvmesh.core.config import ENV_PREFIX, load_config, nearest, options_of
from kvmesh.core.errors import ConfigError

_KINDS = ("gateway", "scheduler", "kvmanager", "prefill", "decode")

_OF_OTHERS = frozenset(f"{ENV_PREFIX}{name}" for name in ("HOSTS",))
"""Variables of other commands or containers that resemble a mistyped one of `up`."""


def option_problems(environ: Mapping[str, str], twins: Collection[str], root: Path) -> list[str]:
    """Returns the problems of options in the environment, one line each.

    Args:
        environ: the set variables that begin with `KVMESH_`.
        twins: environment variables of the flags of `up`.
        root: checkout that contains `services`.
    """
    sections = {name: value for name, value in environ.items() if "__" in name}
    found = list(_mistyped(set(environ) - set(sections), twins))
    if not sections and f"{ENV_PREFIX}CONFIG" not in environ:
        return found
    configs = _configs(root)
    known = {leaf.env for config in configs.values() for leaf in options_of(config)}
    unknown = set(sections) - known
    found += [f"{name}: no service has this option{nearest(name, known)}" for name in unknown]
    taken = {name: value for name, value in environ.items() if name not in unknown}
    for config in configs.values():
        try:
            _check_tls(load_config(config, environ=taken))
        except ConfigError as error:
            found.append(str(error))
    return sorted(set(found))


def _check_tls(config: Any, path: tuple[str, ...] = ()) -> None:
    """Checks the TLS files that a config names in any of its sections; raises ConfigError."""
    # Imported here, because these load gRPC, which most environments do not need.
    from kvmesh.rpc.channels import TlsConfig  # noqa: PLC0415
    from kvmesh.rpc.tls import check_tls  # noqa: PLC0415

    if isinstance(config, TlsConfig):
        check_tls(config, ".".join(path))
    elif dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            _check_tls(getattr(config, field.name), (*path, field.name))


def _mistyped(names: Collection[str], twins: Collection[str]) -> Iterator[str]:
    # A name that resembles none of them may belong to another program.
    for name in set(names) - set(twins) - _OF_OTHERS:
        if meant := nearest(name, twins):
            yield f"{name}: `up` has no such option{meant}"


def _configs(root: Path) -> dict[str, type[Any]]:
    """Returns the config class of each service that `up` starts, from the checkout."""
    if str(root) not in sys.path:
        sys.path.append(str(root))
    found = {}
    for kind in _KINDS:
        module = vars(importlib.import_module(f"services.{kind}.config"))
        found[kind] = next(each for name, each in module.items() if name.lower() == f"{kind}config")
    return found
