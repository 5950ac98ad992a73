"""Runs clients and load generators of others, unchanged, against a local stack.

    python -m scripts.try_clients [NAME ...] [--page]

Each program gets an environment of its own with the newest version there is, in
~/.cache/kvmesh/clients, and tells what worked (scripts/clients). After each, nothing may be held
anywhere in the stack. Programs that do not install are told of and left out. Results are kept, so
that `--page` has those of earlier runs too.
Tests: tests/unit/packaging/test_try_clients.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from kvmesh.core.config import child_environment, environment
from scripts.client_environments import InstallError, install, installed_version, python_of
from scripts.client_programs import PROGRAMS, Program
from scripts.client_report import (
    CaseResult,
    ProgramResult,
    parse_cases,
    table,
    verdict,
    with_table,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
EMBEDDED = ROOT / "models" / "pydoc-6m"
CHAT_TEMPLATE = ROOT / "tests" / "unit" / "gateway" / "templates" / "qwen2.5.jinja"
MODEL = "pydoc-6m"

HELD_NOWHERE = (
    "kvmesh_gateway_requests_open",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",  # blocks that are only cached do not count
    "kvmesh_sequences_held",
    "kvmesh_prefill_slots_used",
    "kvmesh_decode_sequences",
    "kvmesh_decode_reservations_open",
)
"""Gauges that are zero when no request is anywhere."""

_PROGRAM_S = 1800.0
_SETTLE_S = 20.0
_POLL_S = 0.2
_TIMEOUT_S = 5.0


def held(families: str, owner: str) -> dict[str, float]:
    """What a process still holds, by the text of its metrics."""
    return {
        f"{owner} {sample.name}": sample.value
        for family in text_string_to_metric_families(families)
        for sample in family.samples
        if sample.name in HELD_NOWHERE and sample.value
    }


def left_behind(state: Path) -> dict[str, float]:
    """What the stack holds when it has had time to let go; empty is right.

    Args:
        state: its folder.
    """
    members = json.loads((state / "stack.json").read_text())["members"]
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        found: dict[str, float] = {}
        for member in members:
            if member["metrics_port"]:
                url = f"http://127.0.0.1:{member['metrics_port']}/metrics"
                with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                    found |= held(answer.read().decode(), member["name"])
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(_POLL_S)


def try_program(program: Program, folder: Path, url: str, state: Path) -> ProgramResult:
    """Runs one program against the stack.

    Args:
        folder: of all environments.
        url: of the gateway.
        state: the stack's folder.
    """
    version = installed_version(program, folder)
    target = (f"{url}/v1", MODEL, str(folder / "model"))
    if program.is_node:
        command = ["node", str(folder / program.folder / program.script), *target]
    else:
        python = python_of(program, folder)
        command = [str(python), "-m", f"scripts.clients.{program.script}", *target]
    paths = f"{ROOT / 'libs'}:{ROOT}" if not program.distribution else str(ROOT)
    # One thread: many of them bring numerical libraries that would take all cores.
    env = child_environment({"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    log = folder / f"{program.folder}.log"
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=_PROGRAM_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ProgramResult(program, version, problem=f"did not end in {_PROGRAM_S:.0f} s")
    cases = parse_cases(done.stdout.splitlines())
    problem = "" if cases and not done.returncode else f"exit code {done.returncode}, see {log}"
    if found := left_behind(state):
        problem = f"left behind: {found}"
    return ProgramResult(program, version, cases, problem)


def run_all(programs: Sequence[Program], folder: Path, console: Console) -> None:
    """Tries what is installed, against the stack that the environment names; keeps the results."""
    url, state = environment("KVMESH_URL"), Path(environment("KVMESH_STATE_DIR"))
    for program in programs:
        console.print(f"{program.name} ...", highlight=False)
        result = try_program(program, folder, url, state)
        console.print(f"  {result.version}: {verdict(result)}", highlight=False, markup=False)
        keep([result], folder)


def make_model(folder: Path) -> Path:
    """The embedded model with a chat template that has tools; returns its folder."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    for path in (*EMBEDDED.iterdir(), CHAT_TEMPLATE):
        name = "chat_template.jinja" if path is CHAT_TEMPLATE else path.name
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(path)
    return model


def prepare(
    programs: Sequence[Program], folder: Path, is_fresh: bool, console: Console
) -> Iterator[ProgramResult]:
    """Installs the programs; yields those that do not install."""
    for number, program in enumerate(programs, 1):
        if installed_version(program, folder) and not is_fresh:
            continue
        console.print(f"installing {program.name} ({number} of {len(programs)})", highlight=False)
        try:
            install(program, folder)
        except InstallError as error:
            console.print(f"  {error}", style="yellow", highlight=False, markup=False)
            yield ProgramResult(program, "", problem=str(error))


def run_in_stack(names: Sequence[str], folder: Path) -> int:
    """Starts a stack of this checkout's code, runs this program in it; its exit code."""
    state = folder / "state"
    inner = [sys.executable, "-m", "scripts.try_clients", "--inside", "--folder", str(folder)]
    command = [sys.executable, "-m", "kvmesh.cli", "up", "--port", "0", "--prefill", "1"]
    command += ["--decode", "1", "--model", str(make_model(folder)), "--model-name", MODEL]
    command += ["--dtype", "float32", "--state-dir", str(state)]
    command += ["--run", shlex.join([*inner, *names])]
    env = child_environment({"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"})
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def logged_errors(state: Path) -> list[str]:
    """Lines of level error and tracebacks in the stack's logs."""
    return [
        f"{path.name}: {line}"
        for path in sorted((state / "logs").glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if " ERROR " in line or line.startswith("Traceback")
    ]


def keep(results: Sequence[ProgramResult], folder: Path) -> None:
    """Adds results to those of earlier runs, or replaces them."""
    kept = {each.program.name: each for each in (*kept_results(folder), *results)}
    told = [dataclasses.asdict(each) for each in kept.values()]
    (folder / "results.json").write_text(json.dumps(told, indent=2))


def kept_results(folder: Path) -> list[ProgramResult]:
    """The last result of each program, in the order of the table."""
    path = folder / "results.json"
    told = json.loads(path.read_text()) if path.exists() else []
    by_name = {each["program"]["name"]: each for each in told}
    return [_result(PROGRAMS[name], by_name[name]) for name in PROGRAMS if name in by_name]


def _result(program: Program, told: Mapping[str, Any]) -> ProgramResult:
    cases = tuple(CaseResult(**each) for each in told["cases"])
    return ProgramResult(program, told["version"], cases, told["problem"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all programs")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/kvmesh/clients")
    parser.add_argument("--fresh", action="store_true", help="install the newest versions again")
    parser.add_argument("--page", action="store_true", help=f"write the table of {PAGE.name}")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit code 0 if all that was installed works and the stack ended clean."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in PROGRAMS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    programs = [PROGRAMS[name] for name in arguments.names or PROGRAMS]
    folder: Path = arguments.folder.resolve()
    console = Console()
    if arguments.inside:
        run_all(programs, folder, console)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    missing = list(prepare(programs, folder, arguments.fresh, console))
    keep(missing, folder)
    absent = {each.program.name for each in missing}
    installed = [each.name for each in programs if each.name not in absent]
    # Without a name it would run them all.
    code = run_in_stack(installed, folder) if installed else 0
    if code:
        console.print(f"the stack ended with exit code {code}", style="bold red")
        return code
    kept = kept_results(folder)
    results = [each for each in kept if each.program in programs]
    print(table(results))
    if arguments.page:
        PAGE.write_text(with_table(PAGE.read_text(), table(kept)))
    errors = logged_errors(folder / "state")
    for line in errors:
        console.print(line, style="red", highlight=False, markup=False)
    return 1 if errors or any(each.has_failed for each in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
