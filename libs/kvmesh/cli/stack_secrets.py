"""The secrets of a local stack, in files that only this user can read and that are removed at its
end.

No secret is on a command line: services get the path of a file, Redis its configuration file, and
users of Redis get its password in their environment. Tests: tests/unit/cli/test_stack_secrets.py.
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
    """The secrets that the processes of a stack get.

    Attributes:
        mesh_file: path of the file with the mesh's secret.
        redis_file: path of the configuration of the stack's Redis, with its password.
        redis_password: password of that Redis.
    """

    mesh_file: Path
    redis_file: Path
    redis_password: str = field(repr=False)


@contextmanager
def stack_secrets(state: Path, mesh_file: str = "") -> Iterator[StackSecrets]:
    """Provides the secrets of one stack; removes the files that it wrote at the end.

    Args:
        state: state folder of the stack, which this process has locked.
        mesh_file: path of the file with the mesh's secret. Empty: the secret that the environment
            has for services, else a new one.

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
    """Writes a file that only this user can read from its creation on."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWN_FILE), "w") as file:
        file.write(text)


def find_secret(secret_file: str, state_dir: str) -> MeshSecret | None:
    """Returns the secret with which a command calls services; None if there is none.

    Args:
        secret_file: value of `--secret-file`. Empty: the secret of the local stack, else the one
            that the environment has for services, as in their containers.
        state_dir: value of `--state-dir`.

    Raises:
        ConfigError: the file cannot be read, or the secret is too short.
    """
    if secret_file:
        return load_secret(secret_file, name="--secret-file")
    if stack_file := local_stack(state_dir).get("secret_file", ""):
        return load_secret(stack_file)
    return load_secret(environment(_FILE_VARIABLE), environment(_VARIABLE), _FILE_VARIABLE)
