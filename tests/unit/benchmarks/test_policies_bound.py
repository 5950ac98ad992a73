from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.policies_bound import decode_work_s, most_good, most_goodput, most_in_time
from benchmarks.policies_grid import Limits, Load, code_completion, entrants, run_cell
from kvmesh.policy.curves import Quadratic
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.sim.profile import DecodeCost, Device
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.scenario import Objectives
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest

COST = DecodeCost(0.01, 0.0, 1e-5)
DEVICE = Device("d", Quadratic(0.0, 1e-3), COST, 100, 1, 8)
LIMITS = Objectives((TimeoutTier(1 << 62, 5.0),), 0.05)


def one(at_s: float, tokens: int, output: int = 1, first_id: int = 0) -> TraceRequest:
    ids = tuple(range(first_id, first_id - (-tokens // TRACE_BLOCK)))
    return TraceRequest(at_s, tokens, output, ids)


def test_a_decode_step_is_shared_with_the_largest_batch_of_the_limit() -> None:
    # 1,000 tokens add 10 ms to a step, so four such sequences fill 50 ms: a quarter each.
    assert decode_work_s(COST, one(0.0, 1000, 11), 0.05) == pytest.approx(10 * 0.05 / 4)
    assert decode_work_s(COST, one(0.0, 1000, 1), 0.05) == 0.0


def test_a_request_that_misses_a_limit_alone_is_never_good() -> None:
    assert decode_work_s(COST, one(0.0, 4001, 2), 0.05) is None
    assert most_good([one(0.0, 4001, 2)], DEVICE, 100, LIMITS) == 0
    assert most_good([one(0.0, 5002)], DEVICE, 100, LIMITS) == 0
    assert most_good([one(0.0, 5001)], DEVICE, 100, LIMITS) == 1


def test_work_beyond_the_time_of_all_workers_is_not_done() -> None:
    # Two seconds of work each; the last first token is due after 5.9 s.
    requests = [one(0.1 * n, 2001, first_id=100 * n) for n in range(10)]
    assert most_good(requests, DEVICE, 1, LIMITS) == 2
    assert most_good(requests, DEVICE, 4, LIMITS) == 10


jobs_in_order = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=8).map(sorted)


@given(jobs_in_order, st.integers(1, 10))
def test_as_many_jobs_as_any_choice_of_them_ends_in_time(
    jobs: list[tuple[int, int]], slack: int
) -> None:
    def fits(chosen: tuple[tuple[int, int], ...]) -> bool:
        end = 0
        for arrival, work in chosen:
            end = max(end, arrival) + work
            if end > arrival + slack:
                return False
        return True

    most = max(
        count
        for count in range(len(jobs) + 1)
        if any(map(fits, itertools.combinations(jobs, count)))
    )
    assert most_in_time(jobs, slack) == most


def test_a_prefix_is_computed_once() -> None:
    requests = [one(0.1 * n, 2001) for n in range(10)]
    assert most_good(requests, DEVICE, 1, LIMITS) == 10
    assert most_goodput(requests, DEVICE, 1, LIMITS) == pytest.approx(10 / 0.9)


@pytest.mark.parametrize("tpot_ms", [100, 25])
def test_no_system_has_more(tpot_ms: int) -> None:
    requests = code_completion(300, 150.0, seed=1)
    limits = Limits(tpot_ms, 0.2)
    device = load_profile("flowkv").devices["a100"]
    bound = most_goodput(requests, device, 10, limits.objectives)
    chosen = [each for each in entrants() if each.label in ("kvmesh", "mixed, SGLang-like")]
    for entrant in chosen:
        row = run_cell(entrant, Load("code", 150.0, (requests,)), limits).row
        assert 0 < row["goodput/s"] <= bound
        assert row["at most/s"] == pytest.approx(bound, rel=1e-3)
    assert bound < 0.95 * most_goodput(requests, device, 20, limits.objectives)
