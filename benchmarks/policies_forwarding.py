"""Forwarding to idle prefill workers against queues at them, under constant load (P/D-Serve 4).

Tests: tests/unit/benchmarks/test_policies.py.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from benchmarks.policies_experiments import Experiment, Job, Outcome, Rows, Verdict, summary_row
from benchmarks.result import Target
from kvmesh.core.types import Role
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.plots import Series
from kvmesh.sim.profile import Device, Profile
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.report import summarize
from kvmesh.sim.requests import SimRequest
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.simulation import simulate
from kvmesh.sim.steps import ChunkTokens
from kvmesh.sim.systems import SYSTEMS, System
from kvmesh.sim.workload import Workload, closed_loop

_BASELINE, _QUEUES = "pdserve_baseline", "local_queues"
_PAPERS, _OFFERS, _OURS = "pdserve_forwarding", "forwarding", "kvmesh"
_ONE_SLOT = ", 1 slot"
_WARM_S = 10.0
"""Users begin within three seconds; by then their requests no longer arrive together."""

_FORWARDING_NOTES = (
    f"""\
`{_BASELINE}` is the paper's baseline: workers queue prompts, the gateway picks the worker with the
 fewest connections, and a prompt is given up when its limit has passed before its turn.
 `{_PAPERS}` offers prompts to idle workers and gives them up as soon as their first token would be
 late. All other systems do the same, also in queues, and refuse at arrival if too many wait, as
 live gateways do. `{_QUEUES}` counts prompts instead of connections
- rows count the requests that ended while as many as there are users were in flight, as in the
 paper: from {_WARM_S:g} s on, until the first user has no further request. A user whose request is
 refused at arrival waits for as long as the gateway tells it. Workers with 1 slot accept a prompt
 only when idle. They compute chunks of the live default, so KV leaves meanwhile
- `capacity` is the time of all prefill workers in that window, divided by the time that the prompts
 of all ended requests would take them. It bounds the success of a system that serves long and short
 prompts alike. A system that serves more of the short ones can exceed it. Early refusals fall on
 short prompts, whose limit is 5 s, so `{_OFFERS}` serves more of the long ones. With four slots the
 time of a prompt depends on the prompts beside it, so gateways keep up to half of its limit for it
 and give it up sooner
- `served` is the share of the time of all prefill workers in that window in which a worker with 1
 slot computed a prompt that was answered, whichever prompts a system prefers. The rest is prompts
 that were given up, and time without a prompt: until the next one arrives, and until the last KV
 has left. A worker with a queue has the next prompt at hand, so `{_QUEUES}` is the bound of it
""".strip()
    .replace("\n ", " ")
    .split("\n- ")
)


def _served_s(device: Device, request: SimRequest, since_s: float, until_s: float) -> float:
    """Seconds in a window in which a worker that computed nothing else computed the prompt of an
    answered request.
    """
    end_s = request.first_token_s
    if request.refusal is not None or end_s is None:
        return 0.0
    begin_s = end_s - device.prefill_s(request.trace.input_tokens)
    return max(min(end_s, until_s) - max(begin_s, since_s), 0.0)


def _run_at_constant_load(label: str, scenario: Scenario) -> Outcome:
    """Simulates a closed loop; its row is of the time in which every user has a request in flight.

    It also has the share of the prompts that prefill can compute and, if each worker has one slot,
    the share of prefill's time that went into answered prompts.
    """
    result = simulate(scenario)
    last: dict[str, float] = {}
    for each in result.requests:
        user = each.trace.session
        last[user] = max(last.get(user, 0.0), each.arrival_s)
    until_s = min(last.values())
    assert until_s > _WARM_S, "the load lasts longer than its beginning"
    ended = [each for each in result.requests if _WARM_S < (each.finished_s or 0.0) <= until_s]
    found = dataclasses.replace(result, requests=ended, finished_s=until_s)
    row = summary_row(summarize(found))
    prefill = [each for each in scenario.fleet if each.role is Role.PREFILL]
    [device] = {scenario.profile.devices[each.device] for each in prefill}
    # No prompts share a prefix, so nothing is cached.
    needed_s = sum(device.prefill_s(each.trace.input_tokens) for each in ended)
    there_s = (until_s - _WARM_S) * sum(each.count for each in prefill)
    row["capacity"] = round(min(there_s / needed_s, 1.0), 4)
    if device.prefill_slots == 1:
        served_s = sum(_served_s(device, each, _WARM_S, until_s) for each in result.requests)
        row["served"] = round(served_s / there_s, 4)
    return Outcome(row, Series.of(label, result))


def _forwarding_runs(profile: Profile) -> dict[str, tuple[Profile, System, ChunkTokens]]:
    """Returns costs, system and chunk sizes of each row: workers with four prefill slots, then with
    one slot and the chunks that live workers compute.
    """
    one_slot = dataclasses.replace(
        profile,
        devices={
            key: dataclasses.replace(device, prefill_slots=1)
            for key, device in profile.devices.items()
        },
    )
    as_live = ChunkTokens(alone=512)
    runs = {
        each: (profile, SYSTEMS[each], ChunkTokens())
        for each in (_BASELINE, _QUEUES, "pending_tokens", _OFFERS, _OURS)
    }
    for each in (_BASELINE, _QUEUES, _PAPERS, _OFFERS):
        runs[each + _ONE_SLOT] = (one_slot, SYSTEMS[each], as_live)
    return runs


def forwarding(size: float, seed: int) -> Experiment:
    """A constant number of requests, each end adding one, up to four times as many, with prompts of
    mixed lengths (P/D-Serve 4).
    """
    name = "P/D-Serve: forwarding"
    profile = load_profile("flowkv")
    fleet = parse_fleet("home:a100:prefill:6,home:a100:decode:6")
    lengths = LengthDistribution.log_normal(7.5, 1.2, 64, 32_768)
    jobs: list[Job] = []
    for factor in (1, 2, 3, 4):
        num_users, turns = max(int(30 * size), 1) * factor, 24
        workload = Workload(
            num_users * turns, 1.0, lengths, output_tokens=128, turns=turns, think_s=0.0
        )
        requests = closed_loop(workload, seed)
        for kind, (costs, system, chunks) in _forwarding_runs(profile).items():
            scenario = Scenario(costs, fleet, system, requests, chunks=chunks, closed_loop=True)
            label = f"{factor}x {kind}"
            run = partial(_run_at_constant_load, label, scenario)
            jobs.append(Job(name, label, run, len(requests)))

    def judge(rows: Rows) -> Verdict:
        success = {label: row["success"] for label, row in rows.items()}
        least = min(success[f"{n}x {_OURS}"] for n in (1, 2, 3, 4))
        idle_only, live = f"4x {_PAPERS}{_ONE_SLOT}", f"4x {_OFFERS}{_ONE_SLOT}"
        capacity = rows[idle_only]["capacity"]
        note = (
            f"at 4x the paper's baseline keeps {success[f'4x {_BASELINE}']:.1%}, with one slot "
            f"{success[f'4x {_BASELINE}{_ONE_SLOT}']:.1%}; local queues with the live rule for "
            f"deadlines {success[f'4x {_QUEUES}']:.1%} and "
            f"{success[f'4x {_QUEUES}{_ONE_SLOT}']:.1%}; the paper's forwarding to idle workers "
            f"{success[idle_only]:.1%} of the {capacity:.1%} that six prefill workers can compute, "
            f"with the live rule and refusals at arrival {success[live]:.1%}, which takes "
            f"{rows[live]['served']:.1%} of their time, to workers of four slots "
            f"{success[f'4x {_OFFERS}']:.1%}; the default {success[f'4x {_OURS}']:.1%}: no order "
            "of offers serves more than the capacity of prefill; decode workers that help do"
        )
        return Verdict(
            [
                Target("forwarding: success of the default, worst of 1x..4x", least, 0.99),
                Target("forwarding: success of the paper's baseline at 4x",
                       success[f"4x {_BASELINE}"], 0.6, at_most=True),
                Target("forwarding to idle workers: success at 4x, of the capacity",
                       success[idle_only] / capacity, 0.99),
                Target("forwarding with the live rule: answered work at 4x, of that of full queues",
                       rows[live]["served"] / rows[f"4x {_QUEUES}{_ONE_SLOT}"]["served"], 0.99),
            ],
            [note, *_FORWARDING_NOTES],
        )  # fmt: skip

    return Experiment(name, jobs, judge)
