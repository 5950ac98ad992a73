"""A gateway that was killed leaves its folder, and the next one to start removes it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from services.gateway.process_folder import shared_folder


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def _killed_in_its_folder() -> None:
    pid = os.fork()
    if pid == 0:
        with shared_folder() as folder:
            (folder / "gauge_1.db").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_what_a_killed_owner_left_is_removed_and_what_is_used_is_not(tmp_path: Path) -> None:
    with shared_folder() as used:
        _killed_in_its_folder()
        (left,) = set(tmp_path.iterdir()) - {used}
        assert (left / "gauge_1.db").exists()
        stranger = tmp_path / "kvmesh-gateway-made-by-others"
        stranger.mkdir()  # without an owner nobody knows whether it is used
        with shared_folder() as own:
            assert set(tmp_path.iterdir()) == {used, own, stranger}
    assert set(tmp_path.iterdir()) == {stranger}
