"""The folder that is this user's alone."""

import os
import tempfile
from pathlib import Path

import pytest

from kvmesh.core.own_folder import own_temporary_folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folder is to be."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"kvmesh-{os.getuid()}"


def test_it_is_made_once_and_nobody_else_enters_it(place: Path) -> None:
    before = os.umask(0)
    try:
        assert own_temporary_folder() == place
    finally:
        os.umask(before)
    assert place.stat().st_mode & 0o777 == 0o700
    (place / "kept").touch()
    assert own_temporary_folder() == place
    assert (place / "kept").exists()


@pytest.mark.parametrize("mode", [0o710, 0o720, 0o701, 0o755, 0o777])
def test_one_that_others_may_enter_is_not_taken(place: Path, mode: int) -> None:
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(PermissionError, match="not this user's alone"):
        own_temporary_folder()


def test_a_link_to_elsewhere_is_not_followed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not this user's alone"):
        own_temporary_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_not_taken(place: Path) -> None:
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)
    with pytest.raises(PermissionError, match="not this user's alone"):
        own_temporary_folder()
