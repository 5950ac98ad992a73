"""Builds the prefill worker."""

from __future__ import annotations

from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.worker import build_worker
from services.prefill.config import PrefillConfig


async def build(config: PrefillConfig, context: ServiceContext) -> None:
    await build_worker(config, context)
