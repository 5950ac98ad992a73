"""The secret that all services of one mesh share, and proofs made with it.

The secret itself never leaves a process: a caller sends an HMAC of its request.
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
THIS_HOST = ("127.0.0.1", "::1", "[::1]", "localhost")
"""Addresses that other hosts do not reach; services listen there without a secret, too."""

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
        """Returns the proof of `PROOF_BYTES` bytes, which only a holder of the secret can make.

        Args:
            purpose: name of the protocol, without NUL; a proof is invalid in another protocol.
            content: the bytes that are proven.
        """
        return hmac.digest(self._key, purpose.encode() + b"\0" + content, "sha256")

    def accepts(self, proof: bytes, purpose: str, content: bytes) -> bool:
        """Whether a proof is valid; compared in constant time."""
        return hmac.compare_digest(proof, self.proof(purpose, content))

    def __repr__(self) -> str:
        return "MeshSecret(***)"


def new_secret() -> str:
    """Returns a random secret as text."""
    return secrets.token_hex(_RANDOM_BYTES)


def load_secret(file: str, text: str = "", name: str = "server.secret_file") -> MeshSecret | None:
    """Returns the configured secret; None if there is none.

    Args:
        file: path of the file with the secret, where blanks around it do not count; takes
            precedence over `text`.
        text: the secret itself, from the environment.
        name: name of the option for the file, for errors.

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
