from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from kvmesh.cli.stack_state import (
    CHECKOUT,
    find_checkout,
    gateway_url,
    hold_state,
    is_checkout,
    is_held,
    no_gateway,
    read_description,
    remove_description,
    write_description,
)
from kvmesh.core.errors import ConfigError


def test_a_wheel_works_with_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_checkout(CHECKOUT)
    assert find_checkout(CHECKOUT) == CHECKOUT
    monkeypatch.chdir(tmp_path)
    assert find_checkout(tmp_path / "lib" / "python3.11") == tmp_path
    assert not is_checkout(tmp_path)


def test_one_stack_per_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert not is_held(state)
    with hold_state(state):
        assert is_held(state)
        with pytest.raises(ConfigError, match="--state-dir"), hold_state(state):
            pass
    assert not is_held(state)


def test_the_description_goes_with_the_stack(tmp_path: Path) -> None:
    with hold_state(tmp_path):
        assert read_description(tmp_path) is None  # nothing is started yet
        write_description(tmp_path, {"members": []})
        assert read_description(tmp_path) == {"members": []}
    assert read_description(tmp_path) is None  # left by a launcher that was killed
    with hold_state(tmp_path):
        remove_description(tmp_path)
        remove_description(tmp_path)
        assert read_description(tmp_path) is None


def test_half_a_description_counts_for_nothing(tmp_path: Path) -> None:
    with hold_state(tmp_path):
        (tmp_path / "stack.json").write_text("{")
        assert read_description(tmp_path) is None


def test_the_lock_goes_with_its_holder(tmp_path: Path) -> None:
    program = (
        "import signal, sys; from pathlib import Path\n"
        "from kvmesh.cli.stack_state import hold_state\n"
        "with hold_state(Path(sys.argv[1])):\n    print('held', flush=True); signal.pause()"
    )
    argv = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert is_held(tmp_path)
        holder.kill()
    assert not is_held(tmp_path)


def test_a_gateway_with_tls_that_is_asked_without() -> None:
    assert "https://" in no_gateway("http://here", aiohttp.ServerDisconnectedError())
    assert "kvmesh up" in no_gateway("http://here", OSError("refused"))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("", "http://127.0.0.1:8000"),
        ("gateway:80", "http://gateway:80"),
        ("https://gateway/v1/", "https://gateway"),
    ],
)
def test_the_url_of_a_gateway(said: str, meant: str, tmp_path: Path) -> None:
    assert gateway_url(argparse.Namespace(url=said, state_dir=str(tmp_path))) == meant
