"""Configuration of the prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.config import option
from kvmesh.runtime.worker_config import WorkerConfig, WorkerSection


@dataclass(frozen=True, slots=True)
class PrefillSection(WorkerSection):
    """A worker whose default role is prefill."""

    role: str = option("prefill", "role of the worker at start: prefill, decode, hybrid or spare")


@dataclass(frozen=True, slots=True)
class PrefillConfig(WorkerConfig):
    """Prefill worker: runs prompts and hands their KV over."""

    worker: PrefillSection = option(PrefillSection, "")
