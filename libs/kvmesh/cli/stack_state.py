"""The state folder of a local stack: who holds it, and what its launcher says about the stack.

A lock, not a process id, tells whether a stack runs: the kernel drops it with its holder, and ids
are used again. Tests: tests/unit/cli/test_stack_state.py.
"""

from __future__ import annotations

import argparse
import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from kvmesh.cli.flags import add_flag
from kvmesh.cli.https import ca_hint
from kvmesh.core.errors import ConfigError


def is_checkout(folder: Path) -> bool:
    """Whether a folder is the root of the repository, which holds the services."""
    return (folder / "services" / "__init__.py").is_file() and (folder / "libs/kvmesh").is_dir()


def find_checkout(source: Path) -> Path:
    """Where services are run from: the root of the sources, if they are those of a checkout.

    A wheel lies elsewhere: then it is the working folder.
    """
    return source if is_checkout(source) else Path.cwd()


CHECKOUT = find_checkout(Path(__file__).resolve().parents[3])

DEFAULT_STATE = CHECKOUT / ".kvmesh"
"""Folder of a stack that was not given another one."""

DEFAULT_URL = "http://127.0.0.1:8000"

_LOCK = "lock"
_DESCRIPTION = "stack.json"
_OWN_FOLDER = 0o700


@contextmanager
def hold_state(state: Path) -> Iterator[None]:
    """Holds the folder, made if need be, for one stack.

    Raises:
        ConfigError: another stack holds it, or it cannot be written.
    """
    with _open_lock(state) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(held_by_another(state)) from error
        yield


def _open_lock(state: Path) -> TextIO:
    try:
        state.mkdir(mode=_OWN_FOLDER, parents=True, exist_ok=True)
        if (state / _LOCK).exists():  # of an earlier stack: nothing but state is in it
            state.chmod(_OWN_FOLDER)
        return (state / _LOCK).open("w")
    except OSError as error:
        raise ConfigError(
            f"{state} cannot be written ({error.strerror}); name another folder with --state-dir"
        ) from error


def held_by_another(state: Path) -> str:
    """What to say to who wants the folder of a running stack."""
    return (
        f"a stack runs already with {state}; stop it, or give this one its own --state-dir and "
        "--port"
    )


def is_held(state: Path) -> bool:
    """Whether a stack runs with this folder."""
    try:
        with (state / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no stack ever ran with it
        return False
    return False


def write_description(state: Path, stack: dict[str, Any]) -> None:
    """Tells other commands what runs where."""
    written = state / f"{_DESCRIPTION}.new"
    written.write_text(json.dumps(stack, indent=2) + "\n")
    written.replace(state / _DESCRIPTION)  # whoever reads it meanwhile gets all of one


def remove_description(state: Path) -> None:
    """To be called when the stack ends."""
    (state / _DESCRIPTION).unlink(missing_ok=True)


def read_description(state: Path) -> dict[str, Any] | None:
    """What runs where; None if no stack runs or it has not started its processes yet."""
    if not is_held(state):
        return None
    try:
        stack: dict[str, Any] = json.loads((state / _DESCRIPTION).read_text())
    except (OSError, ValueError):
        return None
    return stack


def local_stack(state_dir: str) -> dict[str, Any]:
    """What the stack that runs on this machine says; empty if none does.

    Args:
        state_dir: as `kvmesh up` was given it; empty takes the default.
    """
    return read_description(Path(state_dir) if state_dir else DEFAULT_STATE) or {}


def add_state_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--state-dir`, which `local_stack` takes."""
    add_flag(parser, "--state-dir", "", "what `up` was given; default: .kvmesh", metavar="DIR")


def add_url_flag(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Adds `--url`; `gateway_url` reads it and `--state-dir`, and `gateway_urls` several."""
    which = "the gateway, or several, comma-separated" if several else "the gateway"
    text = f"{which}; default: that of `kvmesh up`, else {DEFAULT_URL}"
    add_flag(parser, "--url", "", text, metavar="URL")


def no_gateway(url: str, error: Exception) -> str:
    """What to say when nobody answers at a gateway's URL."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    hint = ca_hint(str(error)) or "start one with `kvmesh up`, or name another with --url"
    if "disconnected" in reason and url.startswith("http://"):
        hint = "if it is one with TLS, say https:// in --url"
    return f"no gateway answers at {url} ({reason}); {hint}"


def gateway_url(arguments: argparse.Namespace) -> str:
    """Base URL of the gateway that is meant, without the `/v1` that OpenAI clients are given."""
    url: str = arguments.url or local_stack(arguments.state_dir).get("http", "") or DEFAULT_URL
    return _base_url(url)


def gateway_urls(arguments: argparse.Namespace) -> list[str]:
    """Base URLs of all gateways that are meant, where `--url` may name several."""
    given = [each.strip() for each in arguments.url.split(",") if each.strip()]
    return [_base_url(each) for each in given] or [gateway_url(arguments)]


def _base_url(url: str) -> str:
    whole = url if "://" in url else f"http://{url}"
    return whole.rstrip("/").removesuffix("/v1")
