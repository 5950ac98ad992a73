"""An environment for each client: a virtual one with pip, or a folder with npm."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from scripts.try_clients.programs import CPU_TORCH, Program

ROOT = Path(__file__).resolve().parents[2]
"""Of the checkout."""
CLIENTS = ROOT / "scripts" / "clients"

_INSTALL_S = 1800.0


class InstallError(Exception):
    """A program cannot be had here."""


def python_of(program: Program, folder: Path) -> Path:
    """The interpreter that has the program.

    Args:
        folder: of all environments.
    """
    if not program.distribution:
        return Path(sys.executable)
    return folder / program.folder / "bin" / "python"


def installed_version(program: Program, folder: Path) -> str:
    """The version in its environment; empty if it is not there."""
    if not program.distribution:
        return version("kvmesh")
    if program.is_node:
        manifest = folder / program.folder / "node_modules" / program.distribution / "package.json"
        return json.loads(manifest.read_text())["version"] if manifest.exists() else ""
    name = program.distribution.replace("-", "_").lower()
    found = (folder / program.folder).glob(f"lib/python3*/site-packages/{name}-*.dist-info")
    return next((path.name.removesuffix(".dist-info").split("-")[1] for path in found), "")


def install(program: Program, folder: Path) -> None:
    """Makes the program's environment, anew if there is one.

    Raises:
        InstallError: pip or npm did not manage, or there is none; no environment is left.
    """
    place = folder / program.folder
    shutil.rmtree(place, ignore_errors=True)
    try:
        if program.is_node:
            _install_node(program, place)
        elif program.distribution:
            _install_python(program, folder)
    except BaseException:
        # Nor after Ctrl-C: the next run would take what has a version for whole.
        shutil.rmtree(place, ignore_errors=True)
        raise


def _install_python(program: Program, folder: Path) -> None:
    _run([sys.executable, "-m", "venv", str(folder / program.folder)], folder)
    pip = [str(python_of(program, folder)), "-m", "pip", "install", "-q"]
    pip.append("--disable-pip-version-check")
    pins = folder / "constraints.txt"
    wanted = (ROOT / "constraints.txt").read_text().splitlines()
    pins.write_text("\n".join(line for line in wanted if line.startswith(f"{CPU_TORCH}==")) + "\n")
    _run([*pip, "-c", str(pins), *program.requirements], folder)
    if program.alone:
        _run([*pip, "--no-deps", *program.alone], folder)


def _install_node(program: Program, place: Path) -> None:
    place.mkdir(parents=True)
    # Modules are looked for from the file that asks for them.
    for path in CLIENTS.glob("*.mjs"):
        shutil.copy(path, place)
    (place / "package.json").write_text('{"private": true}\n')
    _run(["npm", "install", "--no-audit", "--no-fund", *program.requirements], place)


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(str(error)) from error
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise InstallError((told or [f"{command[0]} failed"])[-1][:300])
