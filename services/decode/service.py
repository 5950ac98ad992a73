"""Builds the decode worker."""

from __future__ import annotations

from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.empty_spare import build_worker_or_spare
from services.decode.config import DecodeConfig


async def build(config: DecodeConfig, context: ServiceContext) -> None:
    await build_worker_or_spare(config, context)
