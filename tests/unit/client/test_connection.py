from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.client.connection import ClientTls, call_metadata
from kvmesh.core.errors import ConfigError


def test_a_key_travels_as_a_bearer_token() -> None:
    assert call_metadata("k") == (("authorization", "Bearer k"),)
    assert call_metadata(None) == ()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        ClientTls(ca=tmp_path / "ca.pem").credentials()


def test_half_a_pair() -> None:
    with pytest.raises(ConfigError, match="both"):
        ClientTls(cert="cert.pem").credentials()
