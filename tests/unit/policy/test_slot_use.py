from __future__ import annotations

import pytest

from kvmesh.core.details import FleetWorker
from kvmesh.core.types import Role, WorkerLoad
from kvmesh.policy.role_switch import STEADY, ScaleReason, ScaleSignal
from kvmesh.policy.slot_use import SideUse, SlotLimits, SlotMeter, slot_signal, slot_use
from tests.unit.policy.fleet_examples import worker_info

LIMITS = SlotLimits()


def steps(prefill: SideUse, decode: SideUse, seconds: int) -> list[tuple[int, int, Role | None]]:
    """Second, step and role of the signals of a load that stays."""
    signal, found = STEADY, []
    for second in range(seconds):
        use = {Role.PREFILL: prefill, Role.DECODE: decode}
        signal = slot_signal(use, signal, float(second))
        if signal.step:
            found.append((second, signal.step, signal.role))
    return found


def test_use_is_the_mean_share_of_slots_by_role() -> None:
    loads = [WorkerLoad(prefill_active=1), WorkerLoad(), WorkerLoad(decode_running=8)]
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE]
    infos = [worker_info(f"w{number}", role) for number, role in enumerate(roles)]
    workers = [FleetWorker(info, load) for info, load in zip(infos, loads, strict=True)]
    slots = infos[0].prefill_slots, infos[2].decode_slots
    assert slot_use(workers) == {
        Role.PREFILL: SideUse(2, 0.5 / slots[0]),
        Role.DECODE: SideUse(1, 8 / slots[1]),
    }
    assert slot_use(workers[:1]).keys() == {Role.PREFILL}


def test_a_meter_tells_the_mean_of_half_a_minute() -> None:
    info, meter = worker_info("d", Role.DECODE), SlotMeter()

    def seen(running: int, now: float) -> float:
        worker = FleetWorker(info, WorkerLoad(decode_running=running))
        return meter.observe([worker], now)[Role.DECODE].share

    assert seen(8, 0.0) == 1.0
    assert seen(0, 10.0) == 0.5, "a moment in which many end"
    assert seen(8, 30.0) == pytest.approx(2 / 3)
    assert seen(8, 41.0) == 1.0, "what is older does not count"
    assert meter.observe([], 42.0) == {}


def test_more_workers_are_wanted_after_half_a_minute_above_the_target() -> None:
    assert steps(SideUse(2, 0.7), SideUse(2, 0.9), 70) == [
        (30, 1, Role.DECODE),
        (60, 1, Role.DECODE),
    ]
    assert steps(SideUse(2, 1.0), SideUse(2, 0.9), 31) == [(30, 1, Role.PREFILL)], "further off"


def test_fewer_are_wanted_after_five_minutes_where_one_less_would_do() -> None:
    assert steps(SideUse(4, 0.3), SideUse(1, 0.7), 301) == [(300, -1, Role.PREFILL)]
    assert steps(SideUse(2, 0.0), SideUse(2, 0.75), 301) == [(300, -1, Role.PREFILL)]
    assert steps(SideUse(2, 0.5), SideUse(2, 0.6), 900) == [], "one would be above the target"
    assert steps(SideUse(1, 0.0), SideUse(1, 0.0), 900) == [], "never the last"


def test_within_the_tolerance_nothing_changes() -> None:
    assert steps(SideUse(2, 0.76), SideUse(10, 0.69), 900) == []


def test_the_time_starts_again_when_the_load_falls() -> None:
    high, low = SideUse(2, 1.0), SideUse(2, 0.7)
    signal = slot_signal({Role.PREFILL: high}, STEADY, 0.0)
    assert signal == ScaleSignal(0, Role.PREFILL, False, 0.0, ScaleReason.WAITING)
    assert slot_signal({Role.PREFILL: low}, signal, 20.0) == STEADY
    again = slot_signal({Role.PREFILL: high}, STEADY, 25.0)
    assert slot_signal({Role.PREFILL: high}, again, 40.0).step == 0
    assert slot_signal({Role.PREFILL: high}, again, 55.0).reason is ScaleReason.OVERLOAD
