"""What an extra of this distribution installs, resolved over all its dependencies."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.packaging.compose_file import ROOT

PROJECT = "kvmesh"
OF_CUDA = ("cuda-", "nvidia-", "triton")
"""Beginnings of the names of packages that a CUDA build of torch requires and a CPU build does not.
KVMesh has to work without these packages."""


def _project_requirements() -> list[str]:
    """The project's own requirements in the form of package metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = list(project["dependencies"])
    for extra, requirements in project["optional-dependencies"].items():
        rows += [_of_extra(requirement, extra) for requirement in requirements]
    return rows


def _of_extra(requirement: str, extra: str) -> str:
    name, _, marker = requirement.partition(";")
    condition = f"({marker.strip()}) and " if marker else ""
    return f'{name.strip()} ; {condition}extra == "{extra}"'


def _requirements_of(name: str, extras: frozenset[str]) -> Iterable[Requirement]:
    rows = _project_requirements() if name == PROJECT else metadata.requires(name) or []
    for row in rows:
        requirement = Requirement(row)
        marker = requirement.marker
        if name == "torch" and requirement.name.startswith(OF_CUDA):
            continue
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield requirement


def installed_by(extra: str) -> set[str]:
    """Names of all distributions that `pip install kvmesh[extra]` installs, kvmesh apart."""
    start = (PROJECT, frozenset({extra} - {""}))
    seen, todo = {start}, [start]
    while todo:
        for requirement in _requirements_of(*todo.pop()):
            found = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if found not in seen:
                seen.add(found)
                todo.append(found)
    return {name for name, _ in seen} - {PROJECT}


def modules_outside(distributions: set[str]) -> set[str]:
    """Top-level modules of this environment that belong to none of these distributions."""
    inside = {*distributions, PROJECT}
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if not any(canonicalize_name(owner) in inside for owner in owners)
    }
