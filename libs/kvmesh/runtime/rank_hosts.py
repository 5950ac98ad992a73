"""Connects an engine's ranks on several hosts, from the options of worker and of the other hosts.

Tests: tests/unit/runtime/test_rank_hosts.py, tests/vllm/test_rank_hosts.py.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from kvmesh.core.mesh_secret import load_secret
from kvmesh.engine.rank_host import Builds
from kvmesh.engine.rank_lines import RankAccess, RankGate
from kvmesh.rpc.tls import server_context
from kvmesh.runtime.worker_channels import data_tls
from kvmesh.runtime.worker_config import WorkerConfig
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)


def open_gate(config: WorkerConfig, folder: Path | None) -> RankGate | None:
    """Listens for the other hosts of a worker's engine; None: it has none.

    Raises:
        ConfigError: a file cannot be used, the port is taken, or anybody could connect.
        CheckpointError: the folder is not whole.
    """
    engine = config.engine
    if engine.hosts == 1 or folder is None:
        return None
    tls = data_tls(server_context(config.data.tls, "data.tls"), config.data)
    secret = load_secret(config.server.secret_file, config.server.secret)
    gate = RankGate(
        config.server.host,
        engine.ranks_port,
        RankAccess(tls, secret),
        num_hosts=engine.hosts,
        host_ranks=engine.host_ranks,
        told=asdict(Builds.of(folder)),
    )
    log.info("ranks_awaited", hosts=engine.hosts - 1, port=gate.port)
    return gate
