from __future__ import annotations

from kvmesh.core.types import Role, WorkerInfo, WorkerLoad
from kvmesh.policy.reallocation import choose_giver
from tests.unit.policy.fleet_examples import worker_info


def decoding(name: str, running: int) -> tuple[WorkerInfo, WorkerLoad]:
    return worker_info(name, Role.DECODE), WorkerLoad(decode_running=running)


def test_the_quietest_worker_of_the_other_role_gives() -> None:
    prefill = (worker_info("p0"), WorkerLoad())
    workers = [prefill, decoding("d0", 3), decoding("d1", 1), decoding("d2", 2)]
    assert choose_giver(workers, Role.PREFILL) == "d1"
    assert choose_giver([decoding("b", 1), decoding("a", 1)], Role.PREFILL) == "a"


def test_the_last_worker_of_a_role_stays() -> None:
    hybrid = (worker_info("h0", Role.HYBRID), WorkerLoad())
    assert choose_giver([decoding("d0", 0), hybrid], Role.PREFILL) is None
    assert choose_giver([decoding("d0", 0), decoding("d1", 0)], Role.DECODE) is None


def test_a_share_of_the_slots_is_what_counts() -> None:
    busy, idle = worker_info("p0"), worker_info("p1")
    loads = [(busy, WorkerLoad(prefill_active=1)), (idle, WorkerLoad(decode_running=9))]
    assert choose_giver(loads, Role.DECODE) == "p1"
