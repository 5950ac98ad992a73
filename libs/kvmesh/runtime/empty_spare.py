"""A worker that starts without a model: it waits for an assignment, then loads and serves it.

Everything that needs no model is there before: the process, its ports and the engine's modules.
Tests: tests/integration/test_empty_spare.py, tests/e2e/test_substitutes.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable

from kvmesh.core.empty_spare import Assignment, EmptySpare
from kvmesh.core.errors import ConfigError, KvMeshError
from kvmesh.core.types import Role, WorkerId
from kvmesh.rpc.empty_registration import EmptyRegistration
from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_building import build_worker
from kvmesh.runtime.worker_config import WorkerConfig, parse_role
from kvmesh.runtime.worker_loading import Loading, process_s
from kvmesh.runtime.worker_metrics import WorkerMetrics
from kvmesh.runtime.worker_runner import preload
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1 import decode_service_pb2, kv_pool_service_pb2, prefill_service_pb2

REGISTER_S = 5.0
"""Longest time for which a loaded worker still counts as an empty spare that loads."""

log = event_logger(__name__)


class AssignmentError(KvMeshError):
    """The assigned model cannot be served here; the process ends, and its next life is empty."""


async def build_worker_or_spare(
    config: WorkerConfig, context: ServiceContext, metrics: WorkerMetrics | None = None
) -> None:
    """Builds a worker, or an empty spare if it has the role and no model.

    Args:
        metrics: of the worker; None registers them for this process.

    Raises:
        ConfigError: as for `build_worker`, or an empty spare has no scheduler.
    """
    if parse_role(config.worker.role) is not Role.SPARE or config.engine.model:
        await build_worker(config, context, metrics)
        return
    targets = config.worker.schedulers
    if not targets:
        raise ConfigError(
            "a spare without engine.model waits for a scheduler's assignment: set "
            "worker.scheduler_targets"
        )
    await asyncio.to_thread(preload, config.engine)
    empty_s = process_s(time.time())
    name = config.worker.id or f"spare-{context.host}-{context.port}"
    config = dataclasses.replace(config, worker=dataclasses.replace(config.worker, id=name))
    spare = EmptySpare(
        WorkerId(name),
        time.time_ns() // 1_000_000,
        config.worker.cluster,
        config.engine.kind,
    )
    # Rules about callers may name the rpcs that come with the model.
    context.announce(
        prefill_service_pb2.DESCRIPTOR,
        decode_service_pb2.DESCRIPTOR,
        kv_pool_service_pb2.DESCRIPTOR,
    )
    registration = EmptyRegistration(targets, spare, context.access)

    async def load(assignment: Assignment) -> Worker:
        loading = Loading(time.time(), empty_s, assignment)
        return await build_worker(assigned(config, assignment), context, metrics, loading)

    context.spawn(_become(context, registration, load), "empty spare")
    log.info("waits_for_model", worker_id=spare.worker_id, engine=spare.engine)


async def _become(
    context: ServiceContext,
    registration: EmptyRegistration,
    load: Callable[[Assignment], Awaitable[Worker]],
) -> None:
    """Waits for an assignment and carries it out.

    Raises:
        AssignmentError: its model cannot be loaded or served.
    """
    connected = asyncio.create_task(registration.run())
    try:
        assignment = await registration.assignment()
        log.info("assigned", model=assignment.model, reason=assignment.reason)
        try:
            worker = await load(assignment)
        except ConfigError as error:
            # Not this process's own configuration, so it is started again.
            raise AssignmentError(str(error)) from error
        # Again: streams and tasks end before the objects that they use are closed.
        context.stack.push_async_callback(context.close)
        await worker.wait_registered(REGISTER_S)
    finally:
        connected.cancel()
        await asyncio.gather(connected, return_exceptions=True)


def assigned(config: WorkerConfig, assignment: Assignment) -> WorkerConfig:
    """Returns the config of the worker that an empty spare becomes."""
    worker = dataclasses.replace(
        config.worker, role=assignment.role.value, scenario=assignment.scenario
    )
    engine = dataclasses.replace(
        config.engine,
        model=assignment.checkpoint,
        model_name=assignment.model,
        dtype=assignment.dtype,
        block_size=assignment.block_size,
        max_model_len=assignment.max_model_len,
    )
    return dataclasses.replace(config, worker=worker, engine=engine)
