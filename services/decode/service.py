"""Builds the decode worker."""

from __future__ import annotations

from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.worker import build_worker
from services.decode.config import DecodeConfig


async def build(config: DecodeConfig, context: ServiceContext) -> None:
    await build_worker(config, context)
