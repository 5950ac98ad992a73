from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from kvmesh.cli.__main__ import COMMANDS, main


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"kvmesh {name}" in capsys.readouterr().out


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2
    said = capsys.readouterr().err
    assert "'fly'" in said
    assert len(said.splitlines()) == 1
    assert main(["flet", "list"]) == 2
    assert "did you mean `kvmesh fleet`" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvmesh 0.")


def test_the_version_where_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert main(["--version"]) == 0
    assert "not installed" in capsys.readouterr().out


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvmesh.cli.plan.main", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "kvmesh plan: stopped\n"


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "kvmesh.cli", "plan"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, b"")


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "/proc/plan.json"]) == 1
    assert capsys.readouterr().err.startswith("kvmesh plan: /proc/plan.json: ")


def test_a_missing_package_is_named() -> None:
    program = (
        "import sys; sys.modules['rich'] = None; sys.modules['rich.console'] = None\n"
        "from kvmesh.cli.__main__ import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "needs the package rich" in done.stderr
    assert "kvmesh[local]" in done.stderr


def test_health_needs_grpcio_only() -> None:
    program = (
        "import sys\nfrom kvmesh.cli.__main__ import main\n"
        "try:\n    main(['health', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = 'rich aiohttp psutil redis torch opentelemetry'.split()\n"
        "print('loaded:', *[name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
