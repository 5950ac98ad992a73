from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli import up
from kvmesh.cli.stack import RemoteOptions
from kvmesh.cli.stack_ports import ApiPorts
from kvmesh.cli.stack_state import CHECKOUT, hold_state
from kvmesh.cli.up import main, stack_options
from kvmesh.core.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    "model": "",
    "model_name": "",
    "prefill": 1,
    "decode": 1,
    "host": "127.0.0.1",
    "port": 8000,
    "engine": "kvmesh",
    "dtype": "",
    "device": "cpu",
    "num_blocks": 64,
    "block_size": 16,
    "max_model_len": 0,
    "redis_url": "",
    "remote": 0,
    "spare": 0,
    "empty_spare": 0,
    "link_mbit": 200,
    "threshold": 512,
    "aliases": "",
    "lora": "",
    "max_loras": 0,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "other_models": "",
    "threads": 0,
}
PORTS = ApiPorts(8001, 8002)


def test_the_embedded_model_runs_in_float32() -> None:
    options = stack_options(argparse.Namespace(**DEFAULTS), PORTS, cores=8)
    assert options.model.parent == CHECKOUT / "models"
    assert options.model_name == options.model.name
    assert options.dtype == "float32"
    assert options.num_threads == 4
    assert (options.grpc_port, options.console_port) == (8001, 8002)


def test_a_named_model_runs_in_its_own_dtype(tmp_path: Path) -> None:
    named = {**DEFAULTS, "model": str(tmp_path), "prefill": 3}
    options = stack_options(argparse.Namespace(**named), PORTS, cores=2)
    assert (options.model, options.model_name) == (tmp_path, tmp_path.name)
    assert options.dtype == "auto"
    assert options.num_threads == 1


def test_each_engine_may_have_more_threads_than_its_share() -> None:
    shared = {**DEFAULTS, "threads": 8}
    options = stack_options(argparse.Namespace(**shared), PORTS, cores=8)
    assert (options.num_threads, options.shares_cores) == (8, False)


@pytest.mark.parametrize(
    ("engine", "device", "shares"),
    [("kvmesh", "cpu", True), ("kvmesh", "cuda", False), ("fake", "cpu", False)],
)
def test_engines_on_the_cpu_share_the_cores_among_those_with_work(
    engine: str, device: str, shares: bool
) -> None:
    given = {**DEFAULTS, "engine": engine, "device": device}
    assert stack_options(argparse.Namespace(**given), PORTS, cores=8).shares_cores is shares


def test_other_models_share_the_machine(tmp_path: Path) -> None:
    named = {**DEFAULTS, "aliases": "gpt", "other_models": f"a={tmp_path},b=org/b,c={tmp_path}"}
    options = stack_options(argparse.Namespace(**named), PORTS, cores=12)
    assert [(each.names, each.folder) for each in options.others] == [
        (("a", "c"), tmp_path),
        (("b",), Path("org/b")),
    ]
    assert options.num_workers == 6
    assert options.num_threads == 2
    for taken in ("gpt", options.model_name):
        wrong = {**named, "other_models": f"{taken}={tmp_path}"}
        with pytest.raises(ConfigError, match=f"first model has the name {taken}"):
            stack_options(argparse.Namespace(**wrong), PORTS, cores=12)


def test_members_never_take_a_port_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    options = stack_options(argparse.Namespace(**DEFAULTS), PORTS, cores=8)
    monkeypatch.setattr(up, "free_ports", lambda _host, count: list(range(8000, 8000 + count)))
    taken = up._next_port(options)
    ports = [taken() for _ in range(14)]
    assert ports == list(range(8003, 8017)), "two for each member and two of the admin side"


def test_a_port_that_is_taken_meanwhile_gives_way_to_a_free_one() -> None:
    with socket.socket() as other, socket.socket() as left:
        for each in (other, left):
            each.bind(("127.0.0.1", 0))
        taken, free = other.getsockname()[1], left.getsockname()[1]
        left.close()
        arguments = argparse.Namespace(**DEFAULTS)
        options = stack_options(arguments, ApiPorts(taken, free), cores=8)
        again = up._with_free_ports(options)
        assert (again.http_port, again.grpc_port, again.console_port) == (8000, 0, free)


def test_engines_of_the_second_cluster_take_their_share_of_the_cores() -> None:
    options = stack_options(argparse.Namespace(**{**DEFAULTS, "remote": 2}), PORTS, cores=8)
    assert options.remote == RemoteOptions(2, 200, 512)
    assert (options.num_workers, options.num_threads) == (4, 2)


def test_problems_are_said_and_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    code = main(["--port", "0", "--model", str(tmp_path / "none"), "--state-dir", str(state)])
    assert code == 2
    assert "none is no folder; name a model" in capsys.readouterr().err
    assert not state.exists()


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    state = str(tmp_path / "file" / "state")
    assert main(["--port", "0", "--engine", "fake", "--state-dir", state]) == 2
    assert "--state-dir" in capsys.readouterr().err


def test_a_second_stack_is_told_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold_state(tmp_path):
        assert main(["--state-dir", str(tmp_path)]) == 2
    assert "a stack runs already" in capsys.readouterr().err
