from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.stack import (
    Member,
    OtherModel,
    RemoteOptions,
    StackOptions,
    StackPaths,
    StackPlan,
    engine_environment,
    engine_threads,
    plan_stack,
)
from kvmesh.cli.stack_secrets import StackSecrets
from kvmesh.core.config import load_config
from kvmesh.core.types import Endpoint
from services.prefill.config import PrefillConfig
from services.scheduler.config import SchedulerConfig

OPTIONS = StackOptions(
    model=Path("/models/m"),
    model_name="m",
    num_prefill=2,
    num_decode=1,
    host="127.0.0.1",
    http_port=8000,
    engine="fake",
    dtype="float32",
    device="cpu",
    num_blocks=64,
    block_size=16,
    max_model_len=512,
    num_threads=1,
    redis_url="",
    drain_s=5.0,
)
PATHS = StackPaths(Path("/root"), Path("/state"), Path("/bin/python"), Path("/bin/redis"))
SECRETS = StackSecrets(Path("/state/mesh.secret"), Path("/state/redis-password.conf"), "pass-word")


def _plan(options: StackOptions = OPTIONS) -> StackPlan:
    return plan_stack(options, PATHS, itertools.count(1000).__next__, {"A": "1"}, SECRETS)


def _member(plan: StackPlan, name: str) -> Member:
    [found] = [member for member in plan.members if member.spec.name == name]
    return found


def _flags(member: Member) -> dict[str, str]:
    words = member.spec.argv[3:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_the_gateway_s_ports_are_those_asked_for() -> None:
    plan = _plan(replace(OPTIONS, grpc_port=8001, console_port=8002))
    flags = _flags(_member(plan, "gateway"))
    assert (flags["--http.port"], flags["--server.port"]) == ("8000", "8001")
    assert flags["--server.admin.port"] == "8002"
    assert plan.pool is not None
    assert _flags(_member(plan, "kvmanager"))["--server.admin.port"] == str(plan.pool.port)
    assert plan.grpc.port == 8001


def test_members_start_from_below() -> None:
    names = [member.spec.name for member in _plan().members]
    below, workers = ["redis", "kvmanager", "scheduler"], ["prefill-0", "prefill-1", "decode-0"]
    assert names == [*below, *workers, "gateway"]


def test_each_model_has_workers_and_the_gateway_has_all_models() -> None:
    others = (OtherModel(("b", "bee"), Path("/models/b"), "auto", 64),)
    plan = _plan(replace(OPTIONS, others=others, num_spare=1, lora="x=/x", max_loras=2))
    models = {
        member.spec.name: (flags["--engine.model"], flags["--engine.model-name"])
        for member in plan.members
        if "--engine.model" in (flags := _flags_if_any(member))
    }
    own, other = ("/models/m", "m"), ("/models/b", "b")
    assert models == {
        **dict.fromkeys(("prefill-0", "prefill-1", "decode-0", "spare-0"), own),
        **dict.fromkeys(("prefill-2", "prefill-3", "decode-1"), other),
    }
    flags = _flags(_member(plan, "decode-1"))
    assert (flags["--engine.max-model-len"], flags["--engine.dtype"]) == ("64", "auto")
    assert (flags["--engine.lora"], flags["--engine.max-loras"]) == (
        "",
        "0",
    )  # adapters are the first model's
    assert _flags(_member(plan, "gateway"))["--model.others"] == "b=/models/b,bee=/models/b"


def test_an_empty_spare_has_no_model() -> None:
    flags = _flags(_member(_plan(replace(OPTIONS, num_empty=1)), "empty-0"))
    assert flags["--worker.role"] == "spare"
    assert "--engine.model" not in flags
    of_others = _flags(_member(_plan(), "decode-0"))
    assert flags["--engine.kind"] == of_others["--engine.kind"]
    assert flags["--engine.num-blocks"] == of_others["--engine.num-blocks"]


def _flags_if_any(member: Member) -> dict[str, str]:
    return {} if member.spec.name == "redis" else _flags(member)


def test_members_stop_from_above() -> None:
    ranks = {member.spec.name: member.spec.stop_rank for member in _plan().members}
    assert ranks["gateway"] < ranks["prefill-0"] == ranks["decode-0"] < ranks["scheduler"]
    assert ranks["scheduler"] < ranks["kvmanager"] < ranks["redis"]


def test_no_port_is_used_twice() -> None:
    plan = _plan()
    ports = [member.probe.endpoint.port for member in plan.members]
    ports += [member.metrics_port for member in plan.members if member.metrics_port]
    assert len(set(ports)) == len(ports)


def test_everybody_knows_everybody() -> None:
    plan = _plan()
    redis, kvmanager, scheduler, prefill, gateway = (
        _member(plan, name) for name in ("redis", "kvmanager", "scheduler", "prefill-1", "gateway")
    )
    url = f"redis://{redis.probe.endpoint}/0"
    for member in (kvmanager, scheduler, gateway):
        assert member.spec.env["KVMESH_REDIS__URL"] == url
        assert member.spec.env["KVMESH_REDIS__PASSWORD"] == redis.probe.password == "pass-word"
    assert _flags(scheduler)["--kvmanager.target"] == str(kvmanager.probe.endpoint)
    assert _flags(prefill)["--worker.scheduler-targets"] == str(scheduler.probe.endpoint)
    assert _flags(prefill)["--worker.kvmanager-target"] == str(kvmanager.probe.endpoint)
    assert _flags(prefill)["--worker.id"] == "prefill-1"
    assert _flags(gateway)["--scheduler.targets"] == str(scheduler.probe.endpoint)
    assert plan.http == gateway.probe.endpoint == Endpoint("127.0.0.1", 8000)
    assert str(plan.grpc.port) == _flags(gateway)["--server.port"]


def test_a_running_redis_is_used_and_not_started() -> None:
    plan = _plan(replace(OPTIONS, redis_url="redis://db:6379/1"))
    assert "redis" not in [member.spec.name for member in plan.members]
    env = _member(plan, "kvmanager").spec.env
    assert env["KVMESH_REDIS__URL"] == "redis://db:6379/1"
    assert "KVMESH_REDIS__PASSWORD" not in env  # that of this process's environment counts


def test_secrets_are_files_and_no_words_of_a_command_line() -> None:
    url = "redis://:a-pass-word@db:6379/1"
    for options in (OPTIONS, replace(OPTIONS, redis_url=url)):
        plan = _plan(options)
        assert plan.secret_file == "/state/mesh.secret"
        for member in plan.members:
            assert "pass-word" not in f"{member} {member.spec.argv}"
            if member.spec.name != "redis":
                assert _flags(member)["--server.secret-file"] == "/state/mesh.secret"
            if member.spec.name not in ("kvmanager", "scheduler", "gateway"):
                assert member.spec.env == {"A": "1"}
    assert _member(_plan(), "redis").spec.argv[:2] == ("/bin/redis", "/state/redis-password.conf")


def test_port_zero_and_all_addresses() -> None:
    plan = _plan(replace(OPTIONS, host="0.0.0.0", http_port=0))
    assert plan.http.port >= 1000
    assert plan.http.host == "127.0.0.1"  # what can be asked
    assert _flags(_member(plan, "gateway"))["--http.host"] == "0.0.0.0"


def test_without_prefill_workers_the_others_do_both() -> None:
    plan = _plan(replace(OPTIONS, num_prefill=0, num_decode=2))
    workers = [member for member in plan.members if member.is_worker]
    assert [member.spec.name for member in workers] == ["decode-0", "decode-1"]
    assert {_flags(member)["--worker.role"] for member in workers} == {"hybrid"}
    assert "--worker.role" not in _flags(_member(_plan(), "decode-0"))


def test_a_second_cluster_shares_its_link_and_has_no_way_around_it() -> None:
    alone = _flags(_member(_plan(), "scheduler"))
    assert "--planning.remote-cluster" not in alone
    plan = _plan(replace(OPTIONS, remote=RemoteOptions(2, 400, 300)))
    scheduler = load_config(SchedulerConfig, _member(plan, "scheduler").spec.argv[3:], environ={})
    planning = scheduler.planning
    assert (planning.remote_cluster, planning.threshold_tokens) == ("remote", 300)
    assert planning.egress_mb_s == 50.0
    for name in ("remote-0", "remote-1"):
        member = _member(plan, name)
        assert member.spec.argv[2] == "services.prefill"
        far = load_config(PrefillConfig, member.spec.argv[3:], environ={})
        assert (far.worker.id, far.worker.cluster) == (name, "remote")
        assert (far.worker.channels, far.data.egress_mb_s) == ("tcp", 25.0)
    near = load_config(PrefillConfig, _member(plan, "prefill-0").spec.argv[3:], environ={})
    assert (near.worker.cluster, near.data.egress_mb_s) == ("local", 0.0)


CONFIGS = {
    "kvmanager": ("kvmanager", "KvManagerConfig"),
    "scheduler": ("scheduler", "SchedulerConfig"),
    "prefill-0": ("prefill", "PrefillConfig"),
    "decode-0": ("decode", "DecodeConfig"),
    "gateway": ("gateway", "GatewayConfig"),
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_services_understand_their_flags(name: str) -> None:
    service, class_name = CONFIGS[name]
    config_class = getattr(importlib.import_module(f"services.{service}.config"), class_name)
    member = _member(_plan(), name)
    assert member.spec.argv[:3] == ("/bin/python", "-m", f"services.{service}")
    config: Any = load_config(config_class, member.spec.argv[3:], environ={})
    assert config.telemetry.metrics_port == member.metrics_port
    if name != "gateway":
        assert config.server.port == member.probe.endpoint.port


@pytest.mark.parametrize(
    ("cores", "engines", "threads"), [(2, 2, 1), (2, 4, 1), (16, 4, 4), (16, 3, 5), (1, 0, 1)]
)
def test_cores_are_divided_among_engines(cores: int, engines: int, threads: int) -> None:
    assert engine_threads(cores, engines) == threads


def test_libraries_take_as_many_threads_as_the_engine() -> None:
    assert engine_environment(3) == {"OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "1"}
    assert _member(_plan(), "decode-0").spec.env == {"A": "1"}
