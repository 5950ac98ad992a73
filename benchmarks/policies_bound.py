"""How much goodput any system could have in a cell of the grid: a bound, not a schedule.

Two things cannot be beaten. A request is never good if its prompt takes longer than its TTFT limit
on an idle worker, or its own steps take longer than its TPOT limit. And the work of all good
requests fits into the time that all workers have for it. Work is counted as if a prefix were
computed by the first request that has it and then were cached everywhere, and as if every decode
step had the largest batch that the limit allows.
Tests: tests/unit/benchmarks/test_policies_bound.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.policy.pdserve import timeout_s
from kvmesh.sim.profile import DecodeCost, Device
from kvmesh.sim.scenario import Objectives
from kvmesh.sim.trace import matched_blocks
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest


def decode_work_s(cost: DecodeCost, request: TraceRequest, tpot_s: float) -> float | None:
    """Returns the least worker-seconds of a request's decode steps; None if it misses the limit.

    A step takes c + S seconds, where S is the sum of what its sequences add. A sequence that adds s
    takes the share s / S of it: s (1 + c / S). The mean step of a good request is at most the limit
    T, so the mean of S is at most T - c. 1 + c / S is convex in S, so by Jensen's inequality the
    mean share is at least s T / (T - c). The context, and so s, only grows after the prompt.
    """
    num_steps = request.output_tokens - 1
    if num_steps < 1:
        return 0.0
    own_s = cost.step_s(1, request.input_tokens) - cost.constant
    if cost.constant + own_s > tpot_s:
        return None
    return num_steps * own_s * tpot_s / (tpot_s - cost.constant)


@dataclass(slots=True)
class _Job:
    """Work to be done in time; `begin_s` is when the one machine would begin it."""

    arrival_s: float
    work_s: float
    begin_s: float = 0.0


def most_in_time(jobs: Sequence[tuple[float, float]], slack_s: float) -> int:
    """Returns the largest number of jobs that one machine can end within `slack_s` of arrival.

    In order of arrival; a job that would be late is taken, and the job goes whose removal lets the
    machine end soonest, which is optimal where deadlines are in the order of arrivals (Kise,
    Ibaraki, Mine, Operations Research 26, 1978).

    Args:
        jobs: arrival and work of each in seconds, in order of arrival.
    """
    kept: list[_Job] = []
    end_s = -math.inf
    for arrival_s, work_s in jobs:
        job = _Job(arrival_s, work_s, max(end_s, arrival_s))
        kept.append(job)
        end_s = job.begin_s + work_s
        if end_s <= arrival_s + slack_s + 1e-9:
            continue
        # Without a job all later ones begin sooner, but none before it arrives.
        most, sooner_s, worst = math.inf, -1.0, 0
        for index in range(len(kept) - 1, -1, -1):
            each = kept[index]
            if min(each.work_s, most) > sooner_s:
                sooner_s, worst = min(each.work_s, most), index
            most = min(most, each.begin_s - each.arrival_s)
            if most <= 0.0:
                break
        gone = kept.pop(worst)
        end_s = gone.begin_s
        for each in kept[worst:]:
            each.begin_s = max(end_s, each.arrival_s)
            end_s = each.begin_s + each.work_s
    return len(kept)


def most_good(
    requests: Sequence[TraceRequest], device: Device, num_workers: int, limits: Objectives
) -> int:
    """Returns the largest number of requests that could keep both limits on so many workers.

    The workers count as one that is so many times faster. All prompts get the time of the most
    patient request, once without decode work, and once with it until the last token is due.

    Args:
        requests: in order of arrival, at least one.
    """
    prompts: list[tuple[float, float]] = []
    wholes: list[tuple[float, float]] = []
    first_s = last_s = 0.0
    for each, hits in matched_blocks(requests):
        # The last token of a prompt is computed in a decode step.
        computed = max(each.input_tokens - hits * TRACE_BLOCK, 1) - 1
        prompt_s = device.prefill_s(computed) if computed else 0.0
        ttft_s = timeout_s(each.input_tokens, limits.timeouts)
        decode_s = decode_work_s(device.decode, each, limits.tpot_s)
        if prompt_s > ttft_s or decode_s is None:
            continue
        prompts.append((each.arrival_s, prompt_s / num_workers))
        wholes.append((each.arrival_s, (prompt_s + decode_s) / num_workers))
        first_s = max(first_s, ttft_s)
        last_s = max(last_s, ttft_s + (each.output_tokens - 1) * limits.tpot_s)
    return min(most_in_time(prompts, first_s), most_in_time(wholes, last_s))


def most_goodput(
    requests: Sequence[TraceRequest], device: Device, num_workers: int, limits: Objectives
) -> float:
    """Returns the same per second of arrivals, as goodput is counted."""
    arrivals_s = requests[-1].arrival_s - requests[0].arrival_s
    return most_good(requests, device, num_workers, limits) / arrivals_s
