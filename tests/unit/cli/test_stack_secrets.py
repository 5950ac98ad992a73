from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.cli.stack_secrets import find_secret, stack_secrets
from kvmesh.cli.stack_state import hold_state, write_description
from kvmesh.core.errors import ConfigError
from kvmesh.core.mesh_secret import MeshSecret, new_secret


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMESH_SERVER__SECRET", raising=False)
    monkeypatch.delenv("KVMESH_SERVER__SECRET_FILE", raising=False)


def same(secret: MeshSecret | None, text: str) -> bool:
    return secret is not None and secret.proof("p", b"") == MeshSecret(text).proof("p", b"")


def test_each_stack_has_new_secrets_for_this_user_alone(tmp_path: Path) -> None:
    seen = set()
    for name in ("one", "two"):
        state = tmp_path / name
        with hold_state(state), stack_secrets(state) as secrets:
            assert mode(state) == "0o700"
            assert mode(secrets.mesh_file) == mode(secrets.redis_file) == "0o600"
            assert secrets.redis_file.read_text() == f"requirepass {secrets.redis_password}\n"
            assert secrets.redis_password not in repr(secrets)
            seen |= {secrets.mesh_file.read_text(), secrets.redis_password}
        assert {path.name for path in state.iterdir()} == {"lock"}
    assert len(seen) == 4
    assert min(map(len, seen)) == 64


def test_what_a_stack_that_was_killed_left_is_replaced(tmp_path: Path) -> None:
    with hold_state(tmp_path):
        pass
    tmp_path.chmod(0o755)
    old = tmp_path / "mesh.secret"
    old.write_text("old")
    old.chmod(0o644)
    with hold_state(tmp_path), stack_secrets(tmp_path) as secrets:
        assert mode(tmp_path) == "0o700"
        assert mode(secrets.mesh_file) == "0o600"
        assert secrets.mesh_file.read_text() != "old"


def test_a_folder_that_holds_something_else_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with hold_state(tmp_path):
        assert mode(tmp_path) == "0o755"


def test_a_secret_that_was_named_is_used_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text(new_secret())
    with stack_secrets(tmp_path, str(own)) as secrets:
        assert secrets.mesh_file == own
    assert own.exists()
    monkeypatch.setenv("KVMESH_SERVER__SECRET_FILE", str(own))
    with stack_secrets(tmp_path) as secrets:
        assert secrets.mesh_file == own
    monkeypatch.delenv("KVMESH_SERVER__SECRET_FILE")
    text = new_secret()
    monkeypatch.setenv("KVMESH_SERVER__SECRET", text)
    with stack_secrets(tmp_path) as secrets:
        assert secrets.mesh_file.read_text() == text
    own.write_text("short")
    with pytest.raises(ConfigError, match="--secret-file"), stack_secrets(tmp_path, str(own)):
        pass


def test_a_command_finds_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    assert find_secret("", str(state)) is None
    texts = {name: new_secret() for name in ("flag", "environment")}
    files = {name: tmp_path / name for name in texts}
    for name, text in texts.items():
        files[name].write_text(text)
    monkeypatch.setenv("KVMESH_SERVER__SECRET_FILE", str(files["environment"]))
    assert same(find_secret("", str(state)), texts["environment"])
    monkeypatch.delenv("KVMESH_SERVER__SECRET_FILE")
    with hold_state(state), stack_secrets(state) as secrets:
        write_description(state, {"secret_file": str(secrets.mesh_file)})
        assert secrets.mesh_file.read_text() not in (state / "stack.json").read_text()
        assert same(find_secret("", str(state)), secrets.mesh_file.read_text())
        assert same(find_secret(str(files["flag"]), str(state)), texts["flag"])
    assert find_secret("", str(state)) is None
