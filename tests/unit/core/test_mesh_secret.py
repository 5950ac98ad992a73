from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.core.mesh_secret import PROOF_BYTES, MeshSecret, load_secret, new_secret


def test_only_the_same_secret_purpose_and_content_are_accepted() -> None:
    ours, other = MeshSecret(new_secret()), MeshSecret(new_secret())
    proof = ours.proof("one", b"content")
    assert len(proof) == PROOF_BYTES
    assert ours.accepts(proof, "one", b"content")
    assert not other.accepts(proof, "one", b"content")
    assert not ours.accepts(proof, "two", b"content")
    assert not ours.accepts(proof, "one", b"contents")
    assert not ours.accepts(b"", "one", b"content")
    assert not ours.accepts(ours.proof("on", b"e\0content"), "one", b"content")


def test_a_secret_is_not_printed() -> None:
    text = new_secret()
    assert text not in repr(MeshSecret(text)) + str(MeshSecret(text)) + f"{MeshSecret(text)}"


def test_blanks_around_a_secret_in_a_file_do_not_count(tmp_path: Path) -> None:
    text, file = new_secret(), tmp_path / "mesh.secret"
    file.write_text(f"  {text}\n")
    secret = load_secret(str(file), "another text that would be long enough, too")
    assert secret is not None
    assert secret.proof("p", b"") == MeshSecret(text).proof("p", b"")
    assert load_secret("") is None


def test_a_secret_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("too short\n")
    with pytest.raises(ConfigError, match=r"server\.secret_file .*short: .* at least 32"):
        load_secret(str(short))
    with pytest.raises(ConfigError, match=r"--secret-file .*nothing: No such file"):
        load_secret(str(tmp_path / "nothing"), name="--secret-file")
    with pytest.raises(ConfigError, match="at least 32"):
        load_secret("", "too short")
