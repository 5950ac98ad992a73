"""Runs clients and load generators of others, unchanged, against a local stack.

    python -m scripts.try_clients [NAME ...] [--page]

Each program (programs.py) gets an environment of its own with the newest version there is, in
~/.cache/kvmesh/clients (environments.py). In it runs a script of scripts/clients, which tells what
worked. After each, nothing may be held anywhere in the stack (stack.py). Results are kept
(report.py), so that `--page` has those of earlier runs too.
Tests: tests/unit/packaging/test_try_clients.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from kvmesh.core.config import child_environment, environment
from scripts.try_clients.environments import (
    ROOT,
    InstallError,
    install,
    installed_version,
    python_of,
)
from scripts.try_clients.programs import PROGRAMS, Program
from scripts.try_clients.report import (
    ProgramResult,
    keep,
    kept_results,
    parse_cases,
    table,
    verdict,
    with_table,
)
from scripts.try_clients.stack import MODEL, left_behind, logged_errors, run_in_stack

PAGE = ROOT / "docs" / "compatibility.md"

_PROGRAM_S = 1800.0


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
    log = folder / f"{program.folder}.log"
    # What programs leave among temporary files goes with theirs.
    scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with log.open("w") as errors, scratch as temporary:
        # One thread: many of them bring numerical libraries that would take all cores.
        own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": temporary}
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=child_environment(own),
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
    names = [each.name for each in programs if each.name not in absent]
    inside = [sys.executable, "-m", "scripts.try_clients", "--inside", "--folder", str(folder)]
    # Without a name it would run them all.
    if names and (code := run_in_stack([*inside, *names], folder)):
        console.print(f"the stack ended with exit code {code}", style="bold red")
        return code
    kept = kept_results(folder)
    results = [each for each in kept if each.program in programs]
    print(table(results, has_notes=True))
    if arguments.page:
        PAGE.write_text(with_table(PAGE.read_text(), table(kept)))
    errors = logged_errors(folder / "state")
    for line in errors:
        console.print(line, style="red", highlight=False, markup=False)
    return 1 if errors or any(each.has_failed for each in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
