from __future__ import annotations

import dataclasses

import pytest

from kvmesh.core.pace import PaceRoom, StepPace
from kvmesh.core.turns import at_once
from kvmesh.core.types import Role, WorkerId, WorkerLoad
from kvmesh.policy.load_score import Regime
from kvmesh.policy.role_loop import (
    RoleCycle,
    RoleLoop,
    WorkerReading,
    decode_slots,
    read_worker,
    room_used,
)
from kvmesh.policy.role_switch import Switch, SwitchLimits, SwitchReason
from kvmesh.policy.waiting import Waiting
from tests.unit.policy.fleet_examples import worker_info

IDLE = WorkerLoad(blocks_free=512)
FULL_PREFILL = WorkerLoad(prefill_active=4, blocks_free=256, budget_used=1.0, compute_used=1.0)


def test_the_twelve_indicators_come_from_the_report() -> None:
    load = WorkerLoad(
        prefill_active=3,
        prefill_sending=1,
        decode_running=5,
        decode_reserved=2,
        decode_preempted=1,
        blocks_free=128,
        budget_used=0.5,
        compute_used=0.25,
        memory_bandwidth_used=0.75,
    )
    state = read_worker(worker_info("p"), load, Waiting(7, 9)).state
    assert (state.prefill.running, state.prefill.waiting, state.prefill.sending) == (2, 7, 1)
    decode = state.decode
    assert (decode.running, decode.waiting, decode.swapped, decode.sending) == (5, 0, 1, 2)
    # Five of eight slots are in use, which is more than half of the tokens.
    assert (state.budget_used, state.compute_used) == (0.625, 0.25)
    assert (state.blocks_used, state.memory_bandwidth_used) == (0.75, 0.75)
    state = read_worker(worker_info("d", Role.DECODE), load, Waiting(7, 9)).state
    assert (state.prefill.waiting, state.decode.waiting) == (0, 9)


def test_a_decode_worker_with_all_its_slots_in_use_has_no_budget_left() -> None:
    """A step of eight sequences is full although five hundred tokens would fit."""
    info = dataclasses.replace(worker_info("d", Role.DECODE), decode_slots=8)
    load = WorkerLoad(decode_running=8, budget_used=8 / 512, memory_bandwidth_used=1.0)
    assert read_worker(info, load, Waiting(0, 0)).state.budget_used == 1.0
    assert read_worker(info, WorkerLoad(decode_running=2), Waiting(0, 0)).state.budget_used == 0.25


def test_who_has_no_time_for_more_has_all_its_slots_in_use() -> None:
    """Three long sequences of 64 that fit by slots take all the time that a limit leaves."""
    info = dataclasses.replace(worker_info("d", Role.DECODE), decode_slots=64)
    pace = StepPace(0.01, 1e-7)
    room = PaceRoom(pace, 170_000, strictest_s=0.03)
    full = WorkerLoad(decode_running=3, blocks_free=512, room=room)
    assert decode_slots(info, full) == pytest.approx(3)
    half = dataclasses.replace(full, room=dataclasses.replace(room, context_tokens=85_000))
    assert decode_slots(info, half) == pytest.approx(6)
    assert decode_slots(info, dataclasses.replace(full, room=PaceRoom(pace, 170_000))) == 64
    reading = read_worker(info, full, Waiting(0, 1))
    assert reading.state.budget_used == pytest.approx(1.0)
    assert reading.capacity.decode_slots == pytest.approx(3)


@pytest.mark.parametrize(
    ("role", "running", "blocks_free", "used"),
    [
        (Role.DECODE, 8, 500, 1.0),
        (Role.DECODE, 2, 128, 0.75),
        (Role.HYBRID, 4, 512, 0.5),
        (Role.PREFILL, 8, 256, 0.5),
    ],
)
def test_room_is_what_is_scarcer_of_slots_and_blocks(
    role: Role, running: int, blocks_free: int, used: float
) -> None:
    info = dataclasses.replace(worker_info("w", role), decode_slots=8, num_blocks=512)
    load = WorkerLoad(decode_running=running, blocks_free=blocks_free)
    assert room_used(info, load) == used


def cycled(loop: RoleLoop, readings: list[WorkerReading], now: float) -> RoleCycle:
    return at_once(loop.cycle(readings, now))


class TestRoles:
    @staticmethod
    def readings(
        helper: Role = Role.DECODE, load: WorkerLoad = FULL_PREFILL
    ) -> list[WorkerReading]:
        """Two prefill workers under `load`, two idle decode workers; the first may help."""
        away = read_worker(worker_info("d0", helper), IDLE, Waiting(0, 0))
        home = read_worker(worker_info("d1", Role.DECODE), IDLE, Waiting(0, 0))
        busy = [read_worker(worker_info(f"p{n}"), load, Waiting(4, 0)) for n in range(2)]
        return [away, home, *busy]

    def test_an_idle_worker_helps_and_is_called_back(self) -> None:
        loop = RoleLoop()
        cycle = cycled(loop, self.readings(), 0.0)
        assert cycle.regime is not Regime.NORMAL
        (switch,) = cycle.switches
        assert (switch.worker_id, switch.role) == ("d0", Role.PREFILL)
        loop.carried_out(switch)
        assert loop.is_helping
        quiet = [
            read_worker(worker_info(n, r), IDLE, Waiting(0, 0))
            for n, r in (("d0", Role.PREFILL), ("d1", Role.DECODE), ("p0", Role.PREFILL))
        ]
        for now in range(1, SwitchLimits().min_cycles):
            assert cycled(loop, quiet, 10.0 + now).switches == (), "not before what it brings shows"
        (back,) = cycled(loop, quiet, 20.0).switches
        assert (back.worker_id, back.role, back.cycles) == ("d0", Role.DECODE, 0)
        assert back.reason is SwitchReason.NO_LONGER_NEEDED
        loop.carried_out(back)
        assert not loop.is_helping

    def test_each_mistake_doubles_the_rest(self) -> None:
        """Decode never recovers from the loss of a worker, whatever its score was before; prefill
        has nobody to spare.
        """
        loop, limits = RoleLoop(), SwitchLimits()
        at_work = WorkerLoad(prefill_active=2, budget_used=0.5, compute_used=0.5, blocks_free=512)
        starved = [
            read_worker(worker_info("d0", Role.PREFILL), IDLE, Waiting(0, 0)),
            *(read_worker(worker_info(f"p{n}"), at_work, Waiting(0, 0)) for n in range(2)),
            read_worker(worker_info("d1", Role.DECODE), IDLE, Waiting(0, 90)),
        ]
        rests: list[int] = []
        now, ended_at = 0.0, 0.0
        while len(rests) < 7:
            now += 1.0
            cycle = cycled(loop, starved if loop.is_helping else self.readings(), now)
            for switch in cycle.switches:
                loop.carried_out(switch)
                if switch.cycles:
                    rests.append(int(now - ended_at))
                ended_at = now
        assert rests == [1, 10, 20, 40, 80, limits.max_rest_cycles, limits.max_rest_cycles]

    def test_after_a_return_the_other_side_is_helped_at_once(self) -> None:
        """The load moved over while a worker helped: to have it back is not enough."""
        loop = RoleLoop()
        idle = [read_worker(worker_info(f"p{n}"), IDLE, Waiting(0, 0)) for n in range(2)]
        full = [read_worker(worker_info("d0", Role.DECODE), IDLE, Waiting(0, 90))]
        (switch,) = cycled(loop, [*idle, *full], 0.0).switches
        loop.carried_out(switch)
        prefill = [read_worker(worker_info("p1"), FULL_PREFILL, Waiting(9, 0))]
        decode = [
            read_worker(worker_info(name, Role.DECODE), IDLE, Waiting(0, 0))
            for name in ("p0", "d0")
        ]
        for now in range(10, 10 + SwitchLimits().min_cycles):
            switches = cycled(loop, [*prefill, *decode], float(now)).switches
        (back,) = switches
        assert (back.worker_id, back.role) == ("p0", Role.PREFILL)
        loop.carried_out(back)
        prefill.append(read_worker(worker_info("p0"), FULL_PREFILL, Waiting(9, 0)))
        spare = [
            read_worker(worker_info(f"d{n}", Role.DECODE), IDLE, Waiting(0, 0)) for n in range(2)
        ]
        (help_,) = cycled(loop, [*prefill, *spare], 16.0).switches
        assert help_.reason is SwitchReason.HELPS_PREFILL

    def test_all_whom_their_side_calls_in_one_cycle_are_one_mistake(self) -> None:
        loop, limits = RoleLoop(), SwitchLimits()
        called, over = (
            [Switch(WorkerId(f"d{n}"), Role.DECODE, 0, reason) for n in range(2)]
            for reason in (SwitchReason.NEEDED_AT_HOME, SwitchReason.CYCLES_OVER)
        )
        factor = 1
        for returns in (called, [called[0], over[1]], [over[0], called[1]]):
            cycled(loop, [], 0.0)
            for switch in returns:
                loop.carried_out(switch)
            factor *= 2
            assert loop._rests[Role.PREFILL].cycles_left == factor * limits.rest_cycles
            assert loop._rests[Role.DECODE].cycles_left == 0, "the other side is helped at once"

    def test_who_was_not_told_is_asked_for_again(self) -> None:
        loop = RoleLoop()
        assert (
            cycled(loop, self.readings(), 0.0).switches
            == cycled(loop, self.readings(), 1.0).switches
        )

    def test_a_helper_that_somebody_else_moved_helps_no_more(self) -> None:
        loop = RoleLoop()
        (switch,) = cycled(loop, self.readings(), 0.0).switches
        loop.carried_out(switch)
        cycled(loop, self.readings(helper=Role.HYBRID), 1.0)
        assert not loop.is_helping


def test_a_load_that_has_not_changed_is_not_read_again() -> None:
    loop, info, waiting = RoleLoop(), worker_info("p"), Waiting(3, 0)
    load = WorkerLoad(prefill_active=1)
    reading = loop.read(info, load, waiting)
    assert reading == read_worker(info, load, waiting)
    assert loop.read(info, load, Waiting(3, 0)) is reading
    for changed in (
        (info, WorkerLoad(prefill_active=1, blocks_free=1), waiting),
        (info, load, Waiting(4, 0)),
        (worker_info("p", Role.DECODE), load, waiting),
    ):
        loop.read(info, load, waiting)
        assert loop.read(*changed) == read_worker(*changed) != reading
    fresh, kept = RoleLoop(), RoleLoop()
    for second in range(4):
        theirs = at_once(fresh.cycle([read_worker(info, load, waiting)], float(second)))
        ours = at_once(kept.cycle([kept.read(info, load, waiting)], float(second)))
        assert (ours.fleet, ours.regime) == (theirs.fleet, theirs.regime)
