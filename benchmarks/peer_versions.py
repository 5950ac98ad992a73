"""Versions of the other systems of a benchmark, asked of the interpreters that run them.

Tests: tests/unit/benchmarks/test_peer_versions.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_ASK = """
import json, sys
from importlib.metadata import distributions, packages_distributions
modules = packages_distributions()
names = {name for word in sys.argv[1:] for name in modules.get(word, [word])}
found = {each.name: each.version for each in distributions() if each.name in names}
print(json.dumps(found))
"""

PEERS: Mapping[str, tuple[str, ...]] = {
    "dynamo": ("dynamo",),
    "flashinfer": ("flashinfer",),
    "mooncake": ("mooncake",),
    "nixl": ("nixl", "nixl_cu12", "nixl_cu13"),
    "sglang-router": ("sglang_router",),
    "transformers": ("transformers",),
    "vllm-router": ("vllm_router",),
}
"""What a peer is imported as, or its package; of several names those that are there count."""


def peer_versions(
    pythons: Mapping[str, Path], peers: Mapping[str, tuple[str, ...]] = PEERS
) -> dict[str, str]:
    """Versions by the names of the packages.

    Args:
        pythons: a peer to the interpreter of the environment that has it.
        peers: what each is asked for by.

    Raises:
        SystemExit: an interpreter does not have its peer, or is none.
    """
    found: dict[str, str] = {}
    for peer, python in pythons.items():
        try:
            versions = _asked(python, peers[peer])
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"{python} is no interpreter to ask for {peer}: {error}") from error
        if not versions:
            raise SystemExit(f"{python} has no package of {peer}")
        found |= versions
    return found


def own_versions(*peers: str) -> dict[str, str]:
    """Of those peers that are in this environment."""
    python = Path(sys.executable)
    return {name: each for peer in peers for name, each in _asked(python, PEERS[peer]).items()}


def _asked(python: Path, names: tuple[str, ...]) -> dict[str, str]:
    # Isolated: modules of the folder that it is started from are none of the peer's.
    command = [str(python.absolute()), "-I", "-c", _ASK, *names]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def program_version(name: str) -> dict[str, str]:
    """Of a program, the second word of what it says; nothing where it is not installed."""
    program = shutil.which(name)
    if program is None:
        return {}
    command = [program, "--version"]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return {name: said[1]}
