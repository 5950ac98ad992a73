"""Configuration of the decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.config import option
from kvmesh.runtime.worker_config import WorkerConfig, WorkerSection


@dataclass(frozen=True, slots=True)
class DecodeSection(WorkerSection):
    """A worker whose default role is decode."""

    role: str = option("decode", "role of the worker at start: prefill, decode, hybrid or spare")


@dataclass(frozen=True, slots=True)
class DecodeConfig(WorkerConfig):
    """Decode worker: receives KV and generates tokens."""

    worker: DecodeSection = option(DecodeSection, "")
