"""Makes both sides of a worker's data plane from its configuration.

Tests: tests/unit/runtime/test_worker_channels.py, tests/integration/test_worker.py.
"""

from __future__ import annotations

import ssl

from kvmesh.core.errors import ConfigError
from kvmesh.core.named_values import listed
from kvmesh.policy.transfer_mode import TransferMode
from kvmesh.rpc.channels import PeerTls
from kvmesh.rpc.tls import client_context, server_context
from kvmesh.runtime.worker_config import DataSection, WorkerConfig
from kvmesh.transfer.channel import NIXL, parse_kinds
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.data_server import ReceiveOptions
from kvmesh.transfer.frames import Checksum
from kvmesh.transfer.nixl_process import is_installed
from kvmesh.transfer.tls import DataTls

_CHECKSUMS = {"none": Checksum.NONE, "crc32": Checksum.CRC32, "crc32c": Checksum.CRC32C}
MEGABYTE = 1_000_000
MIN_STAGING_MB = 32
"""Minimum staging memory in MB: two of the largest frames that peers send."""
MAX_POLL_US = 1000
"""Maximum microseconds of polling; the worker does nothing else meanwhile."""


def send_options(config: WorkerConfig) -> SendOptions:
    """Makes the sending options of a worker.

    Raises:
        ConfigError: an unknown or unavailable channel or checksum, two budgets, too long a polling
            time, or a TLS file that cannot be used.
    """
    section, data = config.worker, config.data
    if data.budget_mb_s and data.egress_mb_s:
        raise ConfigError("data.budget_mb_s and data.egress_mb_s exclude each other")
    return SendOptions(
        kinds=_kinds(config),
        lanes=data.lanes,
        checksum=_checksum(data.checksum),
        budget_bytes_s=data.budget_mb_s * MEGABYTE,
        egress_bytes_s=data.egress_mb_s * MEGABYTE,
        stall_timeout_s=section.stall_s,
        patience_s=section.handoff_s,
        tls=data_tls(client_context(data.tls, "data.tls"), data),
        poll_s=_poll_s(data.poll_us),
        staging_bytes=_staging_bytes(data),
    )


def receive_options(config: WorkerConfig) -> ReceiveOptions:
    """Makes the receiving options of a worker.

    Raises:
        ConfigError: as `send_options`.
    """
    section, data = config.worker, config.data
    return ReceiveOptions(
        kinds=_kinds(config),
        host=config.server.host,
        port=section.data_port,
        checksum=_checksum(data.checksum),
        window_bytes=data.window_mb * MEGABYTE,
        stall_timeout_s=section.stall_s,
        tls=data_tls(server_context(data.tls, "data.tls"), data),
        copy_threads=data.copy_threads,
        poll_s=_poll_s(data.poll_us),
        staging_bytes=_staging_bytes(data),
    )


def transfer_mode(word: str) -> TransferMode | None:
    """The configured transfer mode; None leaves the choice to the policy.

    Raises:
        ConfigError: an unknown word.
    """
    if word == "auto":
        return None
    try:
        return TransferMode(word)
    except ValueError as error:
        known = ", ".join(["auto", *(mode.value for mode in TransferMode)])
        raise ConfigError(f"worker.transfer_mode must be one of {known}, got {word!r}") from error


def _kinds(config: WorkerConfig) -> tuple[str, ...]:
    kinds = parse_kinds(config.worker.channels)
    if NIXL in kinds and not is_installed():
        text = "worker.channels names nixl, which is not here: pip install 'kvmesh[nixl]'"
        raise ConfigError(text)
    if NIXL in kinds and config.data.tls != PeerTls():
        text = "worker.channels names nixl, which does not encrypt: leave it or data.tls.* out"
        raise ConfigError(text)
    return kinds


def data_tls(context: ssl.SSLContext | None, data: DataSection) -> DataTls | None:
    """Returns the TLS settings of one end of a data channel; None: plain text.

    Raises:
        ConfigError: peers are named, and certificates are not checked.
    """
    peers = frozenset(listed(data.peers))
    if peers and not (data.tls.cert and data.tls.ca and data.tls.verify_callers):
        raise ConfigError("data.peers needs mTLS: data.tls.cert, data.tls.ca")
    return None if context is None else DataTls(context, peers, data.tls.peer_name)


def _poll_s(microseconds: int) -> float:
    if microseconds > MAX_POLL_US:
        raise ConfigError(f"data.poll_us must be 0 to {MAX_POLL_US}, got {microseconds}")
    return microseconds / 1e6


def _staging_bytes(data: DataSection) -> int:
    if data.staging_mb < MIN_STAGING_MB:
        text = f"data.staging_mb must be at least {MIN_STAGING_MB}, got {data.staging_mb}"
        raise ConfigError(text)
    return data.staging_mb * MEGABYTE


def _checksum(word: str) -> Checksum:
    if word not in _CHECKSUMS:
        raise ConfigError(f"data.checksum must be one of {', '.join(_CHECKSUMS)}, got {word!r}")
    return _CHECKSUMS[word]
