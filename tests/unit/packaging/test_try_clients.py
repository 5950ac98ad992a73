from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from scripts.try_clients import __main__ as try_clients
from scripts.try_clients import environments, stack
from scripts.try_clients.programs import CLIENTS, LOAD_GENERATORS, PROGRAMS, Program
from scripts.try_clients.report import CaseResult, ProgramResult

HELD = 'kvmesh_prefill_slots_used{worker="a"} 2.0\nother 3.0\nkvmesh_sequences_held 0.0\n'


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """The folder of a stack whose one member holds something the first time it is asked."""
    answers = [HELD, ""]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers.pop(0).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        members = [{"name": "redis", "metrics_port": 0}]
        members.append({"name": "prefill-0", "metrics_port": server.server_port})
        (tmp_path / "stack.json").write_text(json.dumps({"members": members}))
        yield tmp_path
        server.shutdown()
        thread.join()


def test_what_is_held_is_named() -> None:
    assert stack.held(HELD, "prefill-0") == {"prefill-0 kvmesh_prefill_slots_used": 2.0}


def test_a_stack_has_time_to_let_go(state: Path) -> None:
    assert stack.left_behind(state) == {}


def test_a_stack_that_does_not_let_go_is_told_of(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "_SETTLE_S", -1.0)
    assert list(stack.left_behind(state)) == ["prefill-0 kvmesh_prefill_slots_used"]


def test_names_and_environments_are_unique() -> None:
    assert len(PROGRAMS) == len({each.folder for each in PROGRAMS.values()})
    assert len(PROGRAMS) == len(CLIENTS) + len(LOAD_GENERATORS)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=lambda each: each.name)
def test_each_program_has_its_script(program: Program) -> None:
    name = program.script if program.is_node else f"{program.script}.py"
    assert (environments.CLIENTS / name).is_file()


def test_the_version_is_that_of_the_environment(tmp_path: Path) -> None:
    node, python = PROGRAMS["@ai-sdk/openai-compatible"], PROGRAMS["lm-eval"]
    assert not environments.installed_version(node, tmp_path)
    assert not environments.installed_version(python, tmp_path)
    package = tmp_path / node.folder / "node_modules" / "@ai-sdk" / "openai-compatible"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"version": "3.1"}')
    site = tmp_path / python.folder / "lib" / "python3.12" / "site-packages"
    (site / "lm_eval-0.5.dist-info").mkdir(parents=True)
    assert environments.installed_version(node, tmp_path) == "3.1"
    assert environments.installed_version(python, tmp_path) == "0.5"


@pytest.mark.parametrize("error", [environments.InstallError("no network"), KeyboardInterrupt()])
def test_what_was_half_installed_does_not_stay(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = next(each for each in PROGRAMS.values() if each.alone)

    def run(command: Sequence[str], folder: Path) -> None:
        if "--no-deps" in command:
            raise error
        package = program.distribution.replace("-", "_").lower()
        site = folder / program.folder / "lib" / "python3.12" / "site-packages"
        (site / f"{package}-0.5.dist-info").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(environments, "_run", run)
    with pytest.raises(type(error)):
        environments.install(program, tmp_path)
    assert not environments.installed_version(program, tmp_path)


def test_a_program_that_does_not_install_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise environments.InstallError("no network")

    monkeypatch.setattr(try_clients, "install", fail)
    programs = [PROGRAMS["llm"], PROGRAMS["kvmesh bench serve"]]
    (missing,) = try_clients.prepare(programs, tmp_path, False, Console(quiet=True))
    assert missing == ProgramResult(PROGRAMS["llm"], "", problem="no network")


def test_nothing_is_run_where_nothing_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise environments.InstallError("no network")

    def start(*_: object) -> int:
        raise AssertionError("a stack was started")

    monkeypatch.setattr(try_clients, "install", fail)
    monkeypatch.setattr(try_clients, "run_in_stack", start)
    assert try_clients.main(["llm", "--folder", str(tmp_path)]) == 0
    assert "not tried" in capsys.readouterr().out


def test_a_program_is_run_and_read(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = state / "python"
    case = json.dumps({"name": "chat", "problem": ""})
    leaves = 'touch "$TMPDIR/left" && echo "$TMPDIR" > where'
    python.write_text(f"#!/bin/sh\n{leaves}\necho noise\necho 'case: {case}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(try_clients, "python_of", lambda *_: python)
    program = PROGRAMS["kvmesh bench serve"]
    result = try_clients.try_program(program, state, "http://127.0.0.1:1", state)
    assert not Path((state / "where").read_text().strip()).exists()
    assert result.cases == (CaseResult("chat", ""),)
    assert not result.has_failed
    python.write_text("#!/bin/sh\nexit 3\n")
    monkeypatch.setattr(try_clients, "left_behind", lambda _: {})
    result = try_clients.try_program(program, state, "http://127.0.0.1:1", state)
    assert result.has_failed
    assert result.problem.startswith("exit code 3")


def test_errors_in_logs_are_found(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gateway.log").write_text("10:00 INFO  fine\n10:01 ERROR gateway bad\n")
    assert stack.logged_errors(tmp_path) == ["gateway.log: 10:01 ERROR gateway bad"]
