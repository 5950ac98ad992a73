from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.cli.preflight import Room, machine_problems, model_problems
from kvmesh.cli.stack import StackOptions, StackPaths
from kvmesh.engine import vllm_check
from tests.unit.cli.tiny_folder import write_folder

GIB = 1024**3


@pytest.fixture
def paths(tmp_path: Path) -> StackPaths:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").touch()
    (tmp_path / "state").mkdir()
    return StackPaths(tmp_path, tmp_path / "state", Path(sys.executable), Path("/bin/redis"))


@pytest.fixture
def options(tmp_path: Path) -> StackOptions:
    return StackOptions(
        model=write_folder(tmp_path / "model"),
        model_name="m",
        num_prefill=1,
        num_decode=1,
        host="127.0.0.1",
        http_port=0,
        engine="kvmesh",
        dtype="auto",
        device="cpu",
        num_blocks=64,
        block_size=16,
        max_model_len=0,
        num_threads=1,
        redis_url="",
        drain_s=5.0,
    )


def problems(options: StackOptions, paths: StackPaths, memory: int, disk: int = GIB) -> list[str]:
    room = Room(memory, disk)
    return machine_problems(options, paths, room) + model_problems(options, room)


def _only(found: list[str]) -> str:
    [problem] = found
    return problem


def test_nothing_to_complain_about(options: StackOptions, paths: StackPaths) -> None:
    assert problems(options, paths, 8 * GIB) == []


def test_a_taken_port(options: StackOptions, paths: StackPaths) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        taken = replace(options, http_port=listening.getsockname()[1])
        assert "--port" in _only(problems(taken, paths, 8 * GIB))
        taken = replace(options, grpc_port=listening.getsockname()[1])
        assert "--grpc-port" in _only(problems(taken, paths, 8 * GIB))


def test_a_host_that_is_another_machine(options: StackOptions, paths: StackPaths) -> None:
    elsewhere = replace(options, host="192.0.2.1")  # reserved for documentation
    assert "--host" in _only(problems(elsewhere, paths, 8 * GIB))


def test_no_redis(options: StackOptions, paths: StackPaths) -> None:
    without = replace(paths, redis_binary=None)
    assert "--redis-url" in _only(problems(options, without, 8 * GIB))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://user:secret@127.0.0.1:{server.getsockname()[1]}/0"
        running = replace(options, redis_url=url)
        assert "Timeout" in _only(problems(running, without, 8 * GIB))
    problem = _only(problems(running, without, 8 * GIB))
    assert "nothing accepts connections at redis://127.0.0.1:" in problem
    assert "secret" not in problem
    gone = replace(options, redis_url=f"unix://{paths.state}/redis.sock")
    assert "redis.sock" in _only(problems(gone, without, 8 * GIB))
    for url in ("redis://:secret@host:99999", "redis://:sec/ret@host", "redis://[::1"):
        problem = _only(problems(replace(options, redis_url=url), without, 8 * GIB))
        assert "redis://HOST:PORT" in problem
        assert "sec" not in problem
    wrong = replace(options, redis_url="db:6379")
    assert "redis://" in _only(problems(wrong, without, 8 * GIB))


def test_a_model_that_lacks_files(options: StackOptions, paths: StackPaths) -> None:
    (options.model / "tokenizer.json").unlink()
    assert "tokenizer.json" in _only(problems(options, paths, 8 * GIB))


def test_too_little_memory(options: StackOptions, paths: StackPaths) -> None:
    assert "--num-blocks" in _only(problems(options, paths, GIB))
    many = replace(options, num_prefill=20)
    assert "21 engines" in _only(problems(many, paths, 8 * GIB))
    assert problems(replace(options, engine="fake"), paths, GIB) == []


def test_memory_counts_kv(options: StackOptions, paths: StackPaths) -> None:
    block_bytes = 2 * 2 * 16 * 2 * 8 * 4
    large = replace(options, num_blocks=8 * GIB // block_bytes)
    assert "GiB" in _only(problems(large, paths, 8 * GIB))
    room = Room(8 * GIB, GIB)
    assert model_problems(replace(large, device="cuda"), room) == []


def test_a_device_that_is_not_there(options: StackOptions, paths: StackPaths) -> None:
    for device in ("mps", "cuda:99"):
        problem = _only(problems(replace(options, device=device), paths, 8 * GIB))
        assert problem.startswith("--device: ")
    assert problems(replace(options, device="cuda:99", engine="fake"), paths, 8 * GIB) == []


def test_a_full_disk(options: StackOptions, paths: StackPaths) -> None:
    problem = _only(problems(options, paths, 8 * GIB, disk=10 << 20))
    assert "10 MiB are free" in problem
    assert "--state-dir" in problem


def test_a_folder_that_cannot_be_written(options: StackOptions, paths: StackPaths) -> None:
    inside = replace(paths, state=Path("/proc/self/here"))
    assert "nothing can be written there" in _only(problems(options, inside, 8 * GIB))


def test_what_is_wrong_in_the_environment(
    options: StackOptions, paths: StackPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMESH_PREFIL", "3")
    assert "did you mean KVMESH_PREFILL?" in _only(problems(options, paths, 8 * GIB))


def test_an_environment_for_services_with_tls(
    options: StackOptions, paths: StackPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMESH_SERVER__TLS__CA", "ca.pem")
    assert "KVMESH_SERVER__TLS__CA is set" in _only(problems(options, paths, 8 * GIB))


def test_what_stands_in_the_way_of_vllm(
    options: StackOptions, paths: StackPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_vllm = replace(options, engine="vllm")
    monkeypatch.setattr(vllm_check, "installation_problems", lambda: ["not installed: pip"])
    found = problems(with_vllm, paths, 8 * GIB)
    assert [each.split()[:4] for each in found] == [
        ["--engine", "vllm:", "not", "installed:"],
        ["--engine", "vllm:", "heads", "of"],
        ["--engine", "vllm:", "blocks", "of"],
    ]
    monkeypatch.setattr(vllm_check, "installation_problems", list)
    served = replace(
        with_vllm,
        block_size=32,
        model=write_folder(options.model, head_dim=32, model_type="of another family"),
    )
    assert "not supported" in _only(problems(served, paths, 8 * GIB)), "the gateway reads it"
    served = replace(served, model=write_folder(options.model, head_dim=32))
    assert problems(served, paths, 8 * GIB) == []
    assert "lower --num-blocks" in _only(problems(served, paths, GIB))
