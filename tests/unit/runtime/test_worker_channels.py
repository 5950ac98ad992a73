"""The data plane's options from a worker's configuration."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.policy.transfer_mode import TransferMode
from kvmesh.rpc.channels import PeerTls
from kvmesh.runtime.worker_channels import receive_options, send_options, transfer_mode
from kvmesh.runtime.worker_config import DataSection, WorkerConfig, WorkerSection
from kvmesh.transfer.frames import Checksum


def test_defaults_allow_every_channel_with_a_checksum() -> None:
    send, receive = send_options(WorkerConfig()), receive_options(WorkerConfig())

    assert send.kinds == receive.kinds == ("local", "ipc", "shm", "tcp")
    assert send.checksum is receive.checksum is Checksum.CRC32C
    assert send.budget_bytes_s == 0
    assert send.tls is receive.tls is None


def test_a_budget_is_for_one_peer_or_for_all_together() -> None:
    def of(**budgets: float) -> tuple[float, float]:
        send = send_options(WorkerConfig(data=DataSection(**budgets)))  # type: ignore[arg-type]
        return send.budget_bytes_s, send.egress_bytes_s

    assert of(budget_mb_s=2.0) == (2e6, 0.0)
    assert of(egress_mb_s=3.0) == (0.0, 3e6)
    with pytest.raises(ConfigError, match="exclude"):
        of(budget_mb_s=2.0, egress_mb_s=3.0)


def test_patience_with_a_handoff_is_the_configs() -> None:
    assert send_options(WorkerConfig(worker=WorkerSection(handoff_s=7.0))).patience_s == 7.0


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorkerConfig(worker=WorkerSection(channels="nixl,tcp"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    for options in (send_options, receive_options):
        with pytest.raises(ConfigError, match=r"kvmesh\[nixl\]"):
            options(config)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "nixl_cu13")
    assert send_options(config).kinds == receive_options(config).kinds == ("nixl", "tcp")


def test_an_engine_that_does_not_encrypt_is_refused_with_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    config = WorkerConfig(
        worker=WorkerSection(channels="nixl,tcp"), data=DataSection(tls=PeerTls(ca="ca.pem"))
    )

    for options in (send_options, receive_options):
        with pytest.raises(ConfigError, match="does not encrypt"):
            options(config)


def test_sizes_are_in_megabytes() -> None:
    data = DataSection(
        budget_mb_s=1.5, window_mb=2, lanes=3, copy_threads=2, poll_us=50, staging_mb=33
    )
    config = WorkerConfig(data=data)

    assert send_options(config).budget_bytes_s == 1.5e6
    assert send_options(config).lanes == 3
    assert send_options(config).poll_s == receive_options(config).poll_s == 5e-5
    assert receive_options(config).window_bytes == 2_000_000
    assert receive_options(config).copy_threads == 2
    assert send_options(config).staging_bytes == receive_options(config).staging_bytes == 33e6


@pytest.mark.parametrize(
    ("section", "data", "match"),
    [
        (WorkerSection(channels="tcp,rdma"), DataSection(), "local, ipc, shm, nixl, tcp"),
        (WorkerSection(channels=" , "), DataSection(), "channels must be"),
        (WorkerSection(), DataSection(checksum="md5"), "md5"),
        (WorkerSection(), DataSection(staging_mb=31), "at least 32"),
        (WorkerSection(), DataSection(poll_us=1001), "0 to 1000"),
        (WorkerSection(), DataSection(tls=PeerTls(ca="/nowhere.pem")), "data.tls"),
        (WorkerSection(), DataSection(peers="prefill"), "data.peers needs mTLS"),
    ],
)
def test_mistakes_are_named(section: WorkerSection, data: DataSection, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        send_options(WorkerConfig(worker=section, data=data))


def test_a_broken_certificate_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "cert.pem"
    broken.write_text("no certificate")
    tls = replace(PeerTls(), cert=str(broken))

    with pytest.raises(ConfigError, match=r"data\.tls"):
        receive_options(WorkerConfig(data=DataSection(tls=tls)))


def test_modes() -> None:
    assert transfer_mode("auto") is None
    assert transfer_mode("whole") is TransferMode.WHOLE
    assert transfer_mode("layered") is TransferMode.LAYERED
    with pytest.raises(ConfigError, match="auto, whole, chunked"):
        transfer_mode("sideways")
