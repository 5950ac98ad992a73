"""Loads a worker's model and builds the worker.

Tests: tests/integration/test_worker_start.py, tests/integration/test_served_families.py.
"""

from __future__ import annotations

import asyncio

from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.rank_hosts import open_gate
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import WorkerConfig
from kvmesh.runtime.worker_loading import Loading, begin
from kvmesh.runtime.worker_metrics import EngineCollector, WorkerMetrics
from kvmesh.runtime.worker_runner import find_folder, load_runner, preload, shared_cores
from kvmesh.runtime.worker_structures import load_structures
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)


async def build_worker(
    config: WorkerConfig,
    context: ServiceContext,
    metrics: WorkerMetrics | None = None,
    loading: Loading | None = None,
) -> Worker:
    """Loads the model and builds a worker; `loading`: of an empty spare, else it begins here."""
    log.info("loading_model", model=config.engine.model, device=config.engine.device)
    folder = await asyncio.to_thread(find_folder, config.engine)
    await asyncio.to_thread(preload, config.engine)
    loading = loading or begin()
    gate = await asyncio.to_thread(open_gate, config, folder)
    try:
        runner = await asyncio.to_thread(load_runner, config.engine, folder, gate)
    finally:
        if gate is not None:
            gate.close()
    context.stack.callback(runner.close)
    structures = await asyncio.to_thread(load_structures, folder, runner.spec)
    if structures is not None:
        context.stack.callback(structures.close)
    cores = shared_cores(config.engine, folder)
    if cores is not None:
        context.stack.callback(cores.close)
    metrics = metrics or WorkerMetrics()
    worker = Worker(config, context, runner, metrics, structures, loading=loading, cores=cores)
    await worker.start()
    metrics.registry.register(EngineCollector(worker.core, runner.spec.name, worker.load))
    log.info(
        "worker_ready",
        worker_id=worker.worker_id,
        model=runner.spec.name,
        num_blocks=runner.kv.num_blocks,
        block_size=worker.core.block_size,
        incarnation=worker.incarnation,
    )
    return worker
