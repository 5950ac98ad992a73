"""The secrets of a local stack: files for this user alone that go when the stack ends.

No secret is on a command line: services are told a file, Redis its configuration file, and those
that use Redis have its password in their environment. Tests: tests/unit/cli/test_stack_secrets.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.cli.stack_state import local_stack
from kvmesh.core.config import environment
from kvmesh.core.mesh_secret import MeshSecret, load_secret, new_secret

_SECRET = "mesh.secret"
_REDIS = "redis-password.conf"
_OWN_FILE = 0o600
_FILE_VARIABLE = "KVMESH_SERVER__SECRET_FILE"
_VARIABLE = "KVMESH_SERVER__SECRET"


@dataclass(frozen=True, slots=True)
class StackSecrets:
    """What the processes of a stack are given.

    Attributes:
        mesh_file: holds the mesh's secret.
        redis_file: the configuration of the Redis that the stack starts, with its password.
        redis_password: of that Redis.
    """

    mesh_file: Path
    redis_file: Path
    redis_password: str = field(repr=False)


@contextmanager
def stack_secrets(state: Path, mesh_file: str = "") -> Iterator[StackSecrets]:
    """The secrets of one stack. Files that are made here are removed at the end.

    Args:
        state: folder of the stack, which this process holds.
        mesh_file: holds the mesh's secret; empty takes the one that the environment has for
            services, else makes a new one.

    Raises:
        ConfigError: the named file cannot be read, or its secret is too short.
    """
    named = mesh_file or environment(_FILE_VARIABLE)
    text = environment(_VARIABLE)
    load_secret(named, text, "--secret-file" if mesh_file else _FILE_VARIABLE)
    made, redis_file, password = state / _SECRET, state / _REDIS, new_secret()
    try:
        if not named:
            _write(made, text or new_secret())
        _write(redis_file, f"requirepass {password}\n")
        yield StackSecrets(Path(named).resolve() if named else made, redis_file, password)
    finally:
        made.unlink(missing_ok=True)
        redis_file.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    """Writes a file that only this user may read, from its first moment on."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWN_FILE), "w") as file:
        file.write(text)


def find_secret(secret_file: str, state_dir: str) -> MeshSecret | None:
    """The secret with which a command calls services; None if there is none.

    Args:
        secret_file: of `--secret-file`; empty takes that of the stack which runs on this machine,
            else the one that the environment has for services, as in their containers.
        state_dir: of `--state-dir`.

    Raises:
        ConfigError: the file cannot be read, or the secret is too short.
    """
    if secret_file:
        return load_secret(secret_file, name="--secret-file")
    if stack_file := local_stack(state_dir).get("secret_file", ""):
        return load_secret(stack_file)
    return load_secret(environment(_FILE_VARIABLE), environment(_VARIABLE), _FILE_VARIABLE)
