"""Where the other hosts of a worker's engine connect, from its options."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.cli.certs import main as make_certs
from kvmesh.core.errors import ConfigError
from kvmesh.core.mesh_secret import new_secret
from kvmesh.engine.rank_host import Builds
from kvmesh.engine.rank_join import Credentials
from kvmesh.engine.rank_lines import LineKind, dial
from kvmesh.rpc.channels import PeerTls
from kvmesh.runtime.app import ServerConfig
from kvmesh.runtime.rank_hosts import open_gate
from kvmesh.runtime.worker_config import DataSection, EngineSection, WorkerConfig
from kvmesh.runtime.worker_runner import find_folder
from tests.unit.engine.tiny_checkpoint import write_checkpoint

HOST = "127.0.0.1"
ENGINE = EngineSection(kind="vllm", hosts=2, tensor_parallel=4)


def test_an_engine_on_one_host_waits_for_nobody(tmp_path: Path) -> None:
    assert open_gate(WorkerConfig(), tmp_path) is None
    assert open_gate(WorkerConfig(engine=ENGINE), None) is None


def test_another_host_is_told_its_ranks_and_what_it_must_have(tmp_path: Path) -> None:
    folder, secret = write_checkpoint(tmp_path), new_secret()
    gate = open_gate(WorkerConfig(server=ServerConfig(secret=secret), engine=ENGINE), folder)
    assert gate is not None
    with closing(gate):
        access = Credentials(PeerTls(), secret=secret).access()
        line, told = dial(HOST, gate.port, access, LineKind.HOST, 1)
        line.close()
    builds = Builds.of(folder)
    assert (told["ranks"], told["checkpoint"], told["vllm"]) == (
        [2, 3],
        builds.checkpoint,
        builds.vllm,
    )


def test_it_shows_the_certificate_of_its_data_channel(tmp_path: Path) -> None:
    assert make_certs(["--out", str(tmp_path), "--hosts", HOST]) == 0
    files = {
        name: PeerTls(
            cert=str(tmp_path / f"{name}.pem"),
            key=str(tmp_path / f"{name}.key"),
            ca=str(tmp_path / "ca.pem"),
        )
        for name in ("prefill", "decode")
    }
    data = DataSection(tls=files["prefill"], peers="decode")
    config = WorkerConfig(server=ServerConfig(host="0.0.0.0"), data=data, engine=ENGINE)
    gate = open_gate(config, write_checkpoint(tmp_path / "model"))
    assert gate is not None
    with closing(gate):
        access = Credentials(files["decode"], ("prefill",)).access()
        line, _ = dial(HOST, gate.port, access, LineKind.HOST, 1)
        line.close()


def test_it_is_closed_by_default(tmp_path: Path) -> None:
    config = WorkerConfig(server=ServerConfig(host="0.0.0.0"), engine=ENGINE)
    with pytest.raises(ConfigError, match=r"server\.secret_file"):
        open_gate(config, write_checkpoint(tmp_path))


@pytest.mark.parametrize(
    "engine",
    [
        replace(ENGINE, hosts=3),
        replace(ENGINE, hosts=8),
        EngineSection(hosts=2),
        EngineSection(kind="fake", hosts=2),
    ],
)
def test_ranks_that_cannot_be_divided_among_hosts_are_refused(engine: EngineSection) -> None:
    with pytest.raises(ConfigError, match=r"engine\.hosts is \d"):
        find_folder(engine)
