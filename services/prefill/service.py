"""Builds the prefill worker."""

from __future__ import annotations

from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.empty_spare import build_worker_or_spare
from services.prefill.config import PrefillConfig


async def build(config: PrefillConfig, context: ServiceContext) -> None:
    await build_worker_or_spare(config, context)
