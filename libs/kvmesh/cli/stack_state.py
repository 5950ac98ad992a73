"""The state folder of a local stack: its lock, and the launcher's description of the stack.

A lock, not a process id, says whether a stack runs: the kernel releases it when its holder ends,
while process ids are reused. Tests: tests/unit/cli/test_stack_state.py.
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
from kvmesh.core.named_values import listed


def is_checkout(folder: Path) -> bool:
    """Whether a folder is the root of the repository, which contains the services."""
    return (folder / "services" / "__init__.py").is_file() and (folder / "libs/kvmesh").is_dir()


def find_checkout(source: Path) -> Path:
    """Returns the folder that services run from: the checkout that contains these sources.

    For an installed wheel it is the working folder.
    """
    return source if is_checkout(source) else Path.cwd()


CHECKOUT = find_checkout(Path(__file__).resolve().parents[3])

DEFAULT_STATE = CHECKOUT / ".kvmesh"
"""State folder of a stack without `--state-dir`."""

DEFAULT_URL = "http://127.0.0.1:8000"

_LOCK = "lock"
_DESCRIPTION = "stack.json"
_OWN_FOLDER = 0o700


@contextmanager
def hold_state(state: Path) -> Iterator[None]:
    """Locks the state folder for one stack; creates it if needed.

    Raises:
        ConfigError: another stack holds the lock, or the folder cannot be written.
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
        if (state / _LOCK).exists():  # an earlier stack made it, so it contains only state
            state.chmod(_OWN_FOLDER)
        return (state / _LOCK).open("w")
    except OSError as error:
        raise ConfigError(
            f"{state} cannot be written ({error.strerror}); name another folder with --state-dir"
        ) from error


def held_by_another(state: Path) -> str:
    """Returns the error message for a state folder that a running stack holds."""
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
    except OSError:  # no stack has used this folder
        return False
    return False


def write_description(state: Path, stack: dict[str, Any]) -> None:
    """Writes the description of the running stack for other commands."""
    written = state / f"{_DESCRIPTION}.new"
    written.write_text(json.dumps(stack, indent=2) + "\n")
    written.replace(state / _DESCRIPTION)  # atomic: a reader sees the old or the new file


def remove_description(state: Path) -> None:
    """Removes the description when the stack ends."""
    (state / _DESCRIPTION).unlink(missing_ok=True)


def read_description(state: Path) -> dict[str, Any] | None:
    """Returns the description; None if no stack runs or its processes are not started yet."""
    if not is_held(state):
        return None
    try:
        stack: dict[str, Any] = json.loads((state / _DESCRIPTION).read_text())
    except (OSError, ValueError):
        return None
    return stack


def local_stack(state_dir: str) -> dict[str, Any]:
    """Returns the description of the stack that runs on this machine; empty if there is none.

    Args:
        state_dir: `--state-dir` of `kvmesh up`; empty for the default.
    """
    return read_description(Path(state_dir) if state_dir else DEFAULT_STATE) or {}


def add_state_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--state-dir`, which `local_stack` takes."""
    add_flag(
        parser, "--state-dir", "", "state folder of `kvmesh up`; default: .kvmesh", metavar="DIR"
    )


def add_url_flag(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Adds `--url`; `gateway_url` reads it and `--state-dir`, and `gateway_urls` several."""
    which = "the gateway, or several, comma-separated" if several else "the gateway"
    text = f"{which}; default: that of `kvmesh up`, else {DEFAULT_URL}"
    add_flag(parser, "--url", "", text, metavar="URL")


def no_gateway(url: str, error: Exception) -> str:
    """Returns the error message for a gateway's URL at which no server answers."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    hint = ca_hint(str(error)) or "start one with `kvmesh up`, or name another with --url"
    if "disconnected" in reason and url.startswith("http://"):
        hint = "if it is one with TLS, say https:// in --url"
    return f"no gateway answers at {url} ({reason}); {hint}"


def gateway_url(arguments: argparse.Namespace) -> str:
    """Returns the base URL of the gateway to use, without the `/v1` of OpenAI clients."""
    url: str = arguments.url or local_stack(arguments.state_dir).get("http", "") or DEFAULT_URL
    return _base_url(url)


def gateway_urls(arguments: argparse.Namespace) -> list[str]:
    """Returns the base URLs of all gateways to use; `--url` may name several."""
    return [_base_url(each) for each in listed(arguments.url)] or [gateway_url(arguments)]


def _base_url(url: str) -> str:
    whole = url if "://" in url else f"http://{url}"
    return whole.rstrip("/").removesuffix("/v1")
