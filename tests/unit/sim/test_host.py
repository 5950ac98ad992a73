from __future__ import annotations

import dataclasses
from dataclasses import asdict

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.core.types import Role
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fields import Fields
from kvmesh.sim.fleet import SimFleet, WorkerGroup, parse_fleet
from kvmesh.sim.host import FRONT_PROCESSES, FRONT_WINDOW_S, STEP_WEIGHT, Host, crowding
from kvmesh.sim.profile import Front, Loop, Sharing, Work
from kvmesh.sim.profile_file import parse_profile
from kvmesh.sim.scenario import Objectives, Scenario
from kvmesh.sim.simulation import simulate
from kvmesh.sim.steps import ChunkTokens
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace_request import TraceRequest
from kvmesh.sim.worker import SimWorker
from kvmesh.sim.worker_rules import WorkerRules
from tests.unit.sim.examples import profile
from tests.unit.sim.test_worker import Log, finish, run_local


def two_workers(sharing: Sharing | None) -> tuple[SimWorker, SimWorker, Log]:
    """1 ms per prompt token, 10 ms per decode step, alone."""
    events = EventQueue()
    log = Log(events)
    fleet = SimFleet(
        events,
        dataclasses.replace(profile(), sharing=sharing),
        log,
        WorkerRules(chunks=ChunkTokens(4096, 4096)),
        report_interval_s=0.0,
    )
    fleet.build((WorkerGroup("home", "d", Role.HYBRID, 2),))
    first, second = fleet.workers.values()
    return first, second, log


@pytest.mark.parametrize(("sharing", "done_s"), [(None, 11.503), (Sharing(2.0, 1.5), 11.763)])
def test_a_prompt_beside_it_makes_decode_slower_for_as_long(
    sharing: Sharing | None, done_s: float
) -> None:
    first, second, log = two_workers(sharing)
    run_local(first, 0, blocks=1, output=1100)
    log.events.after(1.0, lambda: run_local(second, 1, blocks=1, output=1, first_id=9))
    finish(first, log)
    alone = sharing is None
    # The prompt of 513 tokens meets a worker that decodes; its share of steps takes 1.5 times.
    assert log.at("first r1") == pytest.approx(1.513 if alone else 2.026, abs=1e-3)
    assert log.at("done r0") == pytest.approx(done_s, abs=0.1)
    assert (log.at("done r0") > 11.6) is not alone


def test_who_computes_alone_is_as_fast_as_ever() -> None:
    first, second, log = two_workers(Sharing(2.0, 1.5))
    run_local(first, 0, blocks=2, output=4)
    finish(first, log)
    assert log.at("done r0") == pytest.approx(1.025 + 0.03)
    run_local(second, 1, blocks=2, output=4)
    finish(second, log)
    assert log.at("done r1") == pytest.approx(2 * (1.025 + 0.03))


def test_the_dead_take_no_cores() -> None:
    first, second, log = two_workers(Sharing(2.0, 1.5))
    run_local(first, 0, blocks=8, output=1)
    log.events.after(0.5, first.fail)
    log.events.after(0.6, lambda: run_local(second, 1, blocks=1, output=1))
    log.events.run(lambda: False)
    assert log.at("first r1") == pytest.approx(0.6 + 0.513)


class Quiet:
    def others_changed(self) -> None:
        return


def test_every_other_one_that_computes_counts() -> None:
    host = Host(Sharing(1.5, 1.2), lambda: 0.0)
    sharers = [Quiet() for _ in range(3)]
    for each in sharers:
        host.add(each)
        host.note(each, Work.STEPS)
    assert host.prefill_stretch(sharers[0]) == pytest.approx(2.0)
    assert host.decode_stretch(sharers[0]) == pytest.approx(1.4)
    host.note(sharers[0], None)
    assert host.prefill_stretch(sharers[0]) == pytest.approx(2.0), "as if it began now"
    host.note(sharers[1], None)
    assert host.prefill_stretch(sharers[2]) == pytest.approx(1.0)


def test_no_more_disturb_a_worker_than_there_are_other_cores() -> None:
    host = Host(Sharing(1.5, 1.2, Front(2.0, 0.0, 0.0, 0.0)), lambda: 0.0)
    sharers = [Quiet() for _ in range(4)]
    for each in sharers:
        host.add(each)
        host.note(each, Work.PROMPT)
    assert host.prefill_stretch(sharers[0]) == pytest.approx(1.5 * 4 / 2)


def test_the_front_takes_cores_from_those_that_compute() -> None:
    now = 0.0
    host = Host(Sharing(1.5, 1.0, Front(2.0, 0.1, 0.001, 0.01)), lambda: now)
    first, second = Quiet(), Quiet()
    for each in (first, second):
        host.add(each)
        host.note(each, Work.STEPS)
    host.note(first, Work.PROMPT)
    host.note(second, Work.PROMPT)
    assert host.prefill_stretch(first) == pytest.approx(1.5)
    host.note_request(1000)
    host.note_refusals(1)
    host.note_tokens(15)
    cores = 0.125 / FRONT_WINDOW_S
    assert host.front_cores == pytest.approx(cores)
    assert host.prefill_stretch(first) == pytest.approx(1.5 * 2 / (2 - cores))
    assert host.decode_stretch(first) == pytest.approx(2 / (2 - cores)), "no more than there is"
    assert host.message_stretch == pytest.approx((3 + cores) / 2)
    host.note(second, Work.STEPS)
    left = 2 - cores
    assert host.decode_stretch(second) == pytest.approx(
        1 / (left * STEP_WEIGHT / (STEP_WEIGHT + 1))
    )
    assert host.prefill_stretch(first) == pytest.approx(1.5 * (STEP_WEIGHT + 1) / left)
    host.note(second, None)
    assert host.decode_stretch(first) == 1.0, "a core is left for the front"
    now += 3 * FRONT_WINDOW_S
    assert host.front_cores < 0.06 * cores
    assert host.message_stretch == pytest.approx(1.0, abs=0.05)


def on_two_cores(
    step_cores: float = 1.0, loop_cores: float = 0.0, prompt_cores: float = 1.0
) -> Sharing:
    front, loop = Front(2.0, 0.0, 0.0, 0.0), Loop(0.0, 0.0, 0.0, step_cores=loop_cores)
    return Sharing(1.0, 1.0, front, loop, step_cores, prompt_cores)


def test_workers_keep_a_part_however_much_the_front_wants() -> None:
    sharing = on_two_cores()
    assert crowding(2, 0, 50.0, sharing)[Work.STEPS] == pytest.approx((2 + FRONT_PROCESSES) / 2)
    assert crowding(0, 2, 50.0, sharing)[Work.PROMPT] == pytest.approx((2 + FRONT_PROCESSES) / 2)
    assert crowding(1, 0, 0.5, sharing)[Work.STEPS] == 1.0


def test_steps_that_wait_for_their_loop_leave_a_part_of_a_core() -> None:
    """As measured: one worker in decode steps beside two with prompts is as fast as alone."""
    crowded = crowding(1, 2, 0.3, on_two_cores(0.7, 0.15))
    assert crowded[Work.STEPS] == 1.0
    assert crowded[Work.PROMPT] == pytest.approx(2 / (2 - 0.3 - 0.15 - 0.7))


@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("num_prompts", range(5))
@pytest.mark.parametrize("front_cores", [0.0, 0.4, 1.9])
@pytest.mark.parametrize(
    ("step_cores", "loop_cores", "prompt_cores"),
    [(1.0, 0.0, 1.0), (0.7, 0.15, 1.0), (0.05, 0.4, 1.0), (0.05, 0.1, 0.05), (0.8, 0.1, 0.1)],
)
def test_all_cores_are_handed_out_and_steps_wait_less(
    num_steps: int,
    num_prompts: int,
    front_cores: float,
    step_cores: float,
    loop_cores: float,
    prompt_cores: float,
) -> None:
    count = num_steps + num_prompts
    sharing = on_two_cores(step_cores, loop_cores, prompt_cores)
    crowded = crowding(num_steps, num_prompts, front_cores, sharing)
    for_steps = num_steps * step_cores / crowded[Work.STEPS]
    given = for_steps + num_prompts * prompt_cores / crowded[Work.PROMPT]
    rest = 2 - front_cores - num_steps * loop_cores
    left = max(rest, 2 * count / (count + FRONT_PROCESSES)) if count else 0.0
    assert given == pytest.approx(min(num_steps * step_cores + num_prompts * prompt_cores, left))
    if num_steps and num_prompts and prompt_cores == 1.0:
        assert 1.0 <= crowded[Work.STEPS] <= crowded[Work.PROMPT]


def test_workers_with_devices_do_not_make_messages_wait() -> None:
    def stretch(sharing: Sharing) -> float:
        host = Host(sharing, lambda: 0.0)
        for _ in range(2):
            host.note(Quiet(), Work.PROMPT)
        return host.message_stretch

    assert stretch(on_two_cores(prompt_cores=0.1)) == 1.0
    assert stretch(on_two_cores()) == pytest.approx(3 / 2)


def test_a_long_step_takes_longer_from_when_others_begin() -> None:
    """Half of a prompt of 513 ms has the only core, the other half shares it."""
    first, second, log = two_workers(Sharing(1.0, 1.0, Front(1.0, 0.0, 0.0, 0.0)))
    run_local(first, 0, blocks=1, output=1)
    log.events.after(0.2, lambda: run_local(second, 1, blocks=4, output=1, first_id=9))
    finish(first, log)
    assert log.at("first r0") == pytest.approx(0.2 + 2 * 0.313, abs=0.011)


def test_a_step_waits_for_what_its_worker_does_beside_it() -> None:
    """Two prompts and the end of the first; what is done for a lone one takes no time of a step."""

    def done_s(loop: Loop) -> float:
        first, _, log = two_workers(Sharing(1.0, 1.0, None, loop))
        run_local(first, 0, blocks=1, output=100)
        log.events.after(1.0, first.note_refusal)
        log.events.after(1.1, lambda: run_local(first, 1, blocks=1, output=1, first_id=9))
        finish(first, log)
        return log.at("done r0")

    without = done_s(Loop(0.0, 0.0, 0.0))
    assert done_s(Loop(0.0, 0.0, 0.3)) == pytest.approx(without + 0.3)
    assert done_s(Loop(0.5, 0.25, 0.3)) == pytest.approx(without + 0.3 + 0.75)


def test_what_a_worker_does_while_its_engine_waits_delays_no_step() -> None:
    """A refusal of 2 ms, 3 ms before a step ends: with an engine on the CPU, a device, between."""

    def delay_s(cores: float) -> float:
        def done_s(ask_s: float) -> float:
            loop = Loop(0.0, 0.0, ask_s)
            first, _, log = two_workers(Sharing(1.0, 1.0, None, loop, cores, cores))
            run_local(first, 0, blocks=1, output=100)
            log.events.after(1.0, first.note_refusal)
            finish(first, log)
            return log.at("done r0")

        return done_s(0.002) - done_s(0.0)

    assert delay_s(1.0) == pytest.approx(0.002)
    assert 0.001 < delay_s(0.7) < 0.0015
    assert delay_s(0.05) == pytest.approx(0.0)


def test_whoever_waits_makes_those_slower_that_are_served() -> None:
    """Prompts of two requests come one after the other; what asking costs comes on top."""

    def first_token_s(ask_s: float) -> float:
        front = Front(1.0, 0.0, 0.0, ask_s)
        device = dataclasses.replace(profile().devices["d"], prefill_slots=1)
        sharing = Sharing(1.0, 1.0, front)
        made = dataclasses.replace(profile(), devices={"d": device}, sharing=sharing)
        traces = [TraceRequest(0.1 * n, 4000, 4, tuple(range(8 * n, 8 * n + 8))) for n in (0, 1)]
        fleet = parse_fleet("home:d:prefill:1,home:d:decode:1")
        system = SYSTEMS["least_loaded"]
        what = Scenario(
            made,
            fleet,
            system,
            tuple(traces),
            objectives=Objectives((TimeoutTier(1 << 62, 1e6),)),
            chunks=ChunkTokens(512, 512),
        )
        result = simulate(what)
        last = result.requests[-1].first_token_s
        assert last is not None
        return last

    assert first_token_s(0.002) > 1.05 * first_token_s(0.0)


def test_a_profile_names_what_sharing_costs() -> None:
    shipped = {
        "name": "n", "description": "d", "kv_bytes": {"quadratic": [0, 1]},
        "devices": {"d": {"prefill_s": {"quadratic": [0, 1e-3]},
                          "decode_s": asdict(profile().devices["d"].decode),
                          "num_blocks": 8, "prefill_slots": 1, "decode_slots": 2}},
        "links": {"inside_gbps": 1, "between_gbps": 1, "latency_s": 0},
        "plan": {"remote": "d", "local": "d", "num_remote": 0, "num_local": 2, "decode_batch": 1,
                 "decode_step_s": 0.01, "output_tokens": 8,
                 "lengths": {"mu": 5, "sigma": 1, "min": 1, "max": 1000}},
    }  # fmt: skip
    assert parse_profile(Fields(shipped, "p")).sharing is None
    shared = {**shipped, "sharing": {"prefill": 1.5, "decode": 1.25}}
    assert parse_profile(Fields(shared, "p")).sharing == Sharing(1.5, 1.25)
    front = {"cores": 2, "request_s": 0.01, "token_s": 1e-4, "ask_s": 1e-3}
    with_front = {**shipped, "sharing": {"prefill": 1.5, "decode": 1.25, "front": front}}
    assert parse_profile(Fields(with_front, "p")).sharing == Sharing(
        1.5, 1.25, Front(2, 0.01, 1e-4, 1e-3)
    )
    loop = {"prompt_s": 0.002, "decode_s": 0.001, "ask_s": 3e-4}
    with_loop = {**shipped, "sharing": {"prefill": 1.5, "decode": 1.25, "loop": loop}}
    assert parse_profile(Fields(with_loop, "p")).sharing == Sharing(
        1.5, 1.25, None, Loop(0.002, 0.001, 3e-4)
    )
    in_steps = {
        "prefill": 1.5,
        "decode": 1.25,
        "step_cores": 0.7,
        "loop": {**loop, "step_cores": 0.2},
    }
    with_steps = {**shipped, "sharing": in_steps}
    assert parse_profile(Fields(with_steps, "p")).sharing == Sharing(
        1.5, 1.25, None, Loop(0.002, 0.001, 3e-4, step_cores=0.2), 0.7
    )
    in_steps["step_cores"] = 1.5
    with pytest.raises(ConfigError, match=r"p\.sharing: step_cores"):
        parse_profile(Fields(with_steps, "p"))
    in_steps |= {"step_cores": 0.7, "prompt_cores": 0.1}
    found = parse_profile(Fields(with_steps, "p")).sharing
    assert found is not None
    assert (found.step_cores, found.prompt_cores) == (0.7, 0.1)
    in_steps["prompt_cores"] = 0
    with pytest.raises(ConfigError, match=r"p\.sharing: prompt_cores"):
        parse_profile(Fields(with_steps, "p"))
    loop["ask_s"] = -1
    with pytest.raises(ConfigError, match=r"p\.sharing\.loop"):
        parse_profile(Fields(with_loop, "p"))
    front["cores"] = 0
    with pytest.raises(ConfigError, match=r"p\.sharing\.front"):
        parse_profile(Fields(with_front, "p"))
    faster = {**shipped, "sharing": {"prefill": 0.5, "decode": 1.25}}
    with pytest.raises(ConfigError, match=r"p\.sharing"):
        parse_profile(Fields(faster, "p"))
