"""The secret that all services of one mesh share, and the proofs that are made with it.

The secret itself never leaves a process: a caller sends an HMAC of what it is about to do.
Tests: tests/unit/core/test_mesh_secret.py.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

from kvmesh.core.errors import ConfigError
from kvmesh.core.text_files import UNREADABLE, why_unreadable

MIN_SECRET_CHARS = 32
PROOF_BYTES = 32
_RANDOM_BYTES = 32


class MeshSecret:
    """Makes and checks proofs.

    Args:
        text: the secret.

    Raises:
        ConfigError: the secret is too short.
    """

    __slots__ = ("_key",)

    def __init__(self, text: str) -> None:
        if len(text) < MIN_SECRET_CHARS:
            raise ConfigError(f"the mesh's secret must have at least {MIN_SECRET_CHARS} characters")
        self._key = text.encode(errors="surrogateescape")

    def proof(self, purpose: str, content: bytes) -> bytes:
        """The `PROOF_BYTES` bytes that only a holder of the secret can make.

        Args:
            purpose: keeps a proof of one protocol from being valid in another; has no NUL.
            content: what the proof is for.
        """
        return hmac.digest(self._key, purpose.encode() + b"\0" + content, "sha256")

    def accepts(self, proof: bytes, purpose: str, content: bytes) -> bool:
        """Whether a proof is right; compared in constant time."""
        return hmac.compare_digest(proof, self.proof(purpose, content))

    def __repr__(self) -> str:
        return "MeshSecret(***)"


def new_secret() -> str:
    """A random secret as text."""
    return secrets.token_hex(_RANDOM_BYTES)


def load_secret(file: str, text: str = "", name: str = "server.secret_file") -> MeshSecret | None:
    """The configured secret; None without one.

    Args:
        file: holds the secret; blanks around it do not count. Wins over `text`.
        text: the secret itself, from the environment.
        name: of the option that names the file, for errors.

    Raises:
        ConfigError: the file cannot be read, or the secret is too short.
    """
    if not file:
        return MeshSecret(text) if text else None
    try:
        text = Path(file).read_text(encoding="utf-8").strip()
    except UNREADABLE as error:
        raise ConfigError(f"{name} {file}: {why_unreadable(error)}") from error
    try:
        return MeshSecret(text)
    except ConfigError as error:
        raise ConfigError(f"{name} {file}: {error}") from error
