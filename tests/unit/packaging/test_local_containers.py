from __future__ import annotations

import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from scripts.local_containers import CommandError, ContainerHost, PipSettings, run

LISTING = r"""
global.cert='/certs/global.crt'
global.extra-index-url='\nfile:///packages/simple\nhttps://index.example/simple'
global.index-url='https://first.example/simple'
install.find-links='/wheels'
freeze.timeout='10'
:env:.cert='/certs/environment.crt'
:env:.default-timeout='180'
"""


def test_the_environment_wins_over_the_files() -> None:
    assert PipSettings.parse(LISTING).options == {
        "cert": "/certs/environment.crt",
        "extra-index-url": "file:///packages/simple https://index.example/simple",
        "index-url": "https://first.example/simple",
        "find-links": "/wheels",
        "default-timeout": "180",
    }


def test_the_settings_become_a_file_that_pip_reads() -> None:
    settings = PipSettings.parse(LISTING)
    parser = ConfigParser(interpolation=None)
    parser.read_string(settings.config_file())
    assert dict(parser["global"]) == settings.options


def test_local_paths_are_certificates_wheels_and_what_an_index_refers_to() -> None:
    assert PipSettings.parse(LISTING).local_paths() == [
        Path("/certs/environment.crt"),
        Path("/packages"),
        Path("/wheels"),
    ]


def test_a_path_inside_another_is_not_named_again() -> None:
    settings = PipSettings({"find-links": "/packages/files /packages", "cert": "/a.crt"})
    assert settings.local_paths() == [Path("/a.crt"), Path("/packages")]


def test_pip_that_is_not_configured_needs_nothing() -> None:
    settings = PipSettings.parse("")
    assert settings.config_file() == "[global]\n"
    assert settings.local_paths() == []


def test_a_command_returns_its_output() -> None:
    assert run([sys.executable, "-c", "print('out')"], 30) == "out\n"


def test_a_failed_command_says_what_it_wrote() -> None:
    program = "import sys; print('out'); print('why', file=sys.stderr); sys.exit(3)"
    with pytest.raises(CommandError, match=r"(?s)exit code 3.*out.*why"):
        run([sys.executable, "-c", program], 30)


def test_a_command_that_takes_too_long_is_ended_with_what_it_started() -> None:
    # The child holds the pipe: if it lived on, reading to the end would never be over.
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with pytest.raises(CommandError, match="not done after"):
        run([sys.executable, "-c", program, "import signal; signal.pause()"], 0.5)


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    first, second = ContainerHost(tmp_path), ContainerHost(tmp_path)
    with (
        first.locked(),
        pytest.raises(CommandError, match="another run uses"),
        second.locked(),
    ):
        pass
    with second.locked():
        assert str(tmp_path) in second.environment({})["CONTAINERS_CONF"]
