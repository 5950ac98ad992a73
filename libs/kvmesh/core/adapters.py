"""LoRA adapters as the mesh names them, and what schedulers wish workers to have.

An adapter's id is `NAME@CONTENT`: the name that clients use, and a digest of config and weights. So
KV computed with other weights under the same name is never taken for this adapter's.

Tests: tests/unit/core/test_adapters.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.core.types import WorkerId, WorkerInfo

MAX_NAME_CHARS = 128
MAX_FOLDER_CHARS = 4096


@dataclass(frozen=True, slots=True)
class AdapterWish:
    """An adapter that workers are to have.

    Attributes:
        folder: its PEFT folder, as the workers' machines see it.
        revision: grows each time that the adapter is loaded again, so that workers read it again.
    """

    name: str
    folder: str
    revision: int


@dataclass(frozen=True, slots=True)
class AdapterWishes:
    """All adapters that the workers of a model are to have.

    Attributes:
        version: grows with every change; microseconds since 1970 at least, so that it also grows
            after a scheduler has lost it.
    """

    version: int = 0
    wishes: tuple[AdapterWish, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Which of the wishes a worker has carried out, and why others failed.

    Attributes:
        version: of the wishes that it has carried out.
        failures: why it does not have an adapter, by name.
    """

    version: int
    failures: Mapping[str, str] = field(default_factory=dict)


def adapter_id(name: str, content: str) -> str:
    """The id of an adapter with this name and digest."""
    return f"{name}@{content}"


def adapter_name(adapter: str) -> str:
    """The name in an adapter's id; empty for none."""
    return adapter.rpartition("@")[0] or adapter


def name_problem(name: str) -> str:
    """Why clients cannot use a name for an adapter; empty if they can."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        return f"a name has 1 to {MAX_NAME_CHARS} characters"
    if not name.isprintable() or name != name.strip() or set(name) & set(",="):
        return "a name has no commas, no =, no spaces around it and no control characters"
    return ""


def lacking(workers: Iterable[WorkerInfo], model: str, adapter: str) -> frozenset[WorkerId]:
    """The workers of a model that do not have an adapter, by its id."""
    return frozenset(
        each.worker_id for each in workers if each.model == model and adapter not in each.adapters
    )


def made_by(fingerprint: str, adapter: str) -> str:
    """Checkpoint and adapter of a stream as one text; empty while no checkpoint is chosen."""
    return f"{fingerprint}+{adapter}" if fingerprint and adapter else fingerprint


def maker_of(text: str) -> tuple[str, str]:
    """Checkpoint and adapter of a text of `made_by`."""
    fingerprint, _, adapter = text.partition("+")
    return fingerprint, adapter
