"""Configuration of the ranks of one more host."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.config import option, positive
from kvmesh.rpc.channels import PeerTls
from kvmesh.runtime.app import ServerConfig
from kvmesh.telemetry.config import TelemetryConfig


@dataclass(frozen=True, slots=True)
class RanksSection:
    """The worker that leads these ranks, and what of its engine is this host's own."""

    leader: str = option("", "host:port of the worker's engine.ranks_port")
    host: int = positive(1, "number of this host among those of the worker, whose own is 0")
    model: str = option(
        "", "checkpoint folder, or org/name on the Hugging Face hub; the same files as the worker's"
    )
    device: str = option("cpu", "cpu, cuda or cuda:N; the first of this host's ranks takes it")
    num_threads: int = positive(1, "CPU threads of each rank")
    tls: PeerTls = option(PeerTls, "")
    peers: str = option(
        "", "certificate names that the worker may have, comma-separated; empty: all"
    )


@dataclass(frozen=True, slots=True)
class RanksConfig:
    """Ranks of a worker whose engine spans several hosts."""

    server: ServerConfig = option(ServerConfig, "")
    telemetry: TelemetryConfig = option(TelemetryConfig, "")
    ranks: RanksSection = option(RanksSection, "")
