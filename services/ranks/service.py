"""The ranks of one more host of a worker: construction.

Tests: tests/unit/ranks/test_service.py, tests/vllm/test_rank_hosts.py.
"""

from __future__ import annotations

import asyncio

from kvmesh.core.config import default_environment
from kvmesh.core.errors import ConfigError
from kvmesh.core.named_values import listed
from kvmesh.engine.device_names import device_index, require_named_device
from kvmesh.engine.model_source import find_model
from kvmesh.engine.rank_host import Builds, RankHost
from kvmesh.engine.rank_join import Credentials, Join
from kvmesh.engine.vllm_check import engine_environment, engine_problems
from kvmesh.runtime.app import ServiceContext
from services.ranks.config import RanksConfig


async def build(config: RanksConfig, context: ServiceContext) -> None:
    """Constructs the service."""
    section = config.ranks
    host, port = leader_of(section.leader)
    if not section.model:
        raise ConfigError("ranks.model is empty: name the worker's checkpoint with --ranks.model")
    require_named_device(section.device)
    if problems := engine_problems(section.device):
        raise ConfigError("; ".join(problems))
    folder = await asyncio.to_thread(find_model, section.model, is_ours=False)
    default_environment(engine_environment(section.num_threads, section.device))
    ranks = RankHost(
        section.host,
        Join(host, port, 0, folder, device_index(section.device), credentials_of(config)),
        await asyncio.to_thread(Builds.of, folder),
    )
    context.on_close(ranks.close)
    served = context.spawn(_serve(ranks), "ranks")

    async def until_the_leader_ends() -> None:
        # Both are told to end at once, and the leader still has streams to finish.
        ranks.leave()
        await asyncio.wait([served])

    context.on_drain(until_the_leader_ends)


async def _serve(ranks: RankHost) -> None:
    while not ranks.is_leaving:
        await asyncio.to_thread(ranks.run)


def leader_of(target: str) -> tuple[str, int]:
    """Returns host and port.

    Raises:
        ConfigError: it is not `host:port`.
    """
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"ranks.leader is host:port of the worker's engine.ranks_port, not {target!r}"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def credentials_of(config: RanksConfig) -> Credentials:
    """What this host shows to the leader."""
    section, server = config.ranks, config.server
    peers = listed(section.peers)
    return Credentials(section.tls, peers, server.secret_file, server.secret)
