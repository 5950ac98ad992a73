from __future__ import annotations

import pytest

from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.load_score import Regime, Score, ScoredWorker
from kvmesh.policy.role_switch import (
    STEADY,
    Help,
    ScaleReason,
    SwitchLimits,
    SwitchReason,
    plan_switches,
    scale_signal,
)


def side(names: str, prefills: bool, value: float) -> list[ScoredWorker]:
    own = Score(value, 0.0) if prefills else Score(0.0, value)
    return [ScoredWorker(WorkerId(name), prefills, own) for name in names]


class TestHelp:
    WORKERS = (*side("ab", True, 1.2), *side("cdef", False, 0.1))

    def test_idle_workers_of_the_other_side_help_for_some_cycles(self) -> None:
        switches = plan_switches(self.WORKERS, Score(1.2, 0.1), Regime.IMBALANCED, {})
        assert [s.worker_id for s in switches] == ["c", "d"], "half of the side at most"
        assert {(s.role, s.cycles, s.reason) for s in switches} == {
            (Role.PREFILL, SwitchLimits().cycles, SwitchReason.HELPS_PREFILL)
        }

    def test_a_balanced_fleet_stays(self) -> None:
        assert plan_switches(self.WORKERS, Score(1.2, 0.1), Regime.NORMAL, {}) == []

    def test_a_fleet_of_the_wrong_size_helps_itself_meanwhile(self) -> None:
        switches = plan_switches(self.WORKERS, Score(9.0, 0.1), Regime.EXTREME, {})
        assert [s.worker_id for s in switches] == ["c", "d"]

    def test_busy_workers_stay(self) -> None:
        workers = (*side("ab", True, 1.2), *side("cd", False, 0.6))
        assert plan_switches(workers, Score(1.2, 0.6), Regime.IMBALANCED, {}) == []

    def test_prefill_workers_help_decode(self) -> None:
        workers = (*side("ab", True, 0.1), *side("c", False, 1.2))
        switches = plan_switches(workers, Score(0.1, 1.2), Regime.IMBALANCED, {})
        assert [(s.worker_id, s.role) for s in switches] == [("a", Role.DECODE)]

    def test_helpers_count_towards_the_bound(self) -> None:
        helping = {WorkerId("c"): Help(Role.PREFILL, 5), WorkerId("d"): Help(Role.PREFILL, 5)}
        workers = (*side("abcd", True, 1.2), *side("ef", False, 0.1))
        assert plan_switches(workers, Score(1.2, 0.1), Regime.IMBALANCED, helping) == []

    def test_no_more_move_than_it_takes(self) -> None:
        workers = (*side("ab", True, 0.75), *side("cdef", False, 0.3))
        switches = plan_switches(workers, Score(0.75, 0.3), Regime.IMBALANCED, {})
        assert [s.worker_id for s in switches] == ["c"], "0.5 against 0.4 now; one more turns it"

    @pytest.mark.parametrize(
        ("num_home", "home", "helped", "why"),
        [
            (2, 0.4, 1.0, "0.8 at home afterwards: it would be called back"),
            (4, 0.3, 0.72, "0.4 against 0.36: the tables would turn"),
            (1, 0.1, 3.0, "the last one of a side stays"),
        ],
    )
    def test_nobody_moves_who_would_be_called_back(
        self, num_home: int, home: float, helped: float, why: str
    ) -> None:
        num_helped = 1 if num_home == 4 else 2
        workers = (*side("abcd"[:num_home], True, 0.2), *side("yz"[:num_helped], False, helped))
        fleet = Score(home, helped)
        assert plan_switches(workers, fleet, Regime.IMBALANCED, {}) == [], why

    def test_nobody_moves_where_both_sides_are_full(self) -> None:
        workers = (*side("abc", True, 0.2), *side("xyz", False, 4.0))
        assert plan_switches(workers, Score(0.9, 4.0), Regime.EXTREME, {}) == []

    def test_who_is_away_comes_back_before_others_go_the_other_way(self) -> None:
        workers = (*side("abc", True, 0.1), *side("xy", False, 1.2))
        fleet = Score(0.1, 1.2)
        assert plan_switches(workers, fleet, Regime.IMBALANCED, {}) != []
        helping = {WorkerId("c"): Help(Role.PREFILL, SwitchLimits().cycles - 1)}
        assert plan_switches(workers, fleet, Regime.IMBALANCED, helping) == []

    @pytest.mark.parametrize(("resting", "num_moved"), [(Role.PREFILL, 0), (Role.DECODE, 2)])
    def test_nobody_begins_to_help_a_side_right_after_a_return(
        self, resting: Role, num_moved: int
    ) -> None:
        fleet = Score(1.2, 0.1)
        found = plan_switches(self.WORKERS, fleet, Regime.IMBALANCED, {}, resting=[resting])
        assert len(found) == num_moved

    @pytest.mark.parametrize(
        ("fleet", "cycles_left", "reason"),
        [
            (Score(0.4, 0.2), 5, SwitchReason.NO_LONGER_NEEDED),
            (Score(0.3, 1.2), 5, SwitchReason.NEEDED_AT_HOME),
            (Score(0.55, 0.2), 0, SwitchReason.CYCLES_OVER),
        ],
    )
    def test_help_ends_with_the_terminate_signal(
        self, fleet: Score, cycles_left: int, reason: SwitchReason
    ) -> None:
        workers = (*side("abcgh", True, fleet.prefill), *side("d", False, fleet.decode))
        helping = {WorkerId("c"): Help(Role.PREFILL, cycles_left)}
        switches = plan_switches(workers, fleet, Regime.IMBALANCED, helping)
        assert [(s.worker_id, s.role, s.cycles, s.reason) for s in switches] == [
            ("c", Role.DECODE, 0, reason)
        ]

    @pytest.mark.parametrize(
        ("fleet", "cycles_left", "why"),
        [
            (Score(0.6, 0.6), 3, "neither side is needy"),
            (Score(0.1, 0.1), SwitchLimits().cycles - 1, "what the move brought does not show yet"),
            (Score(0.9, 0.2), -7, "the helped side would ask again"),
            (Score(1.5, 1.6), 3, "both are full: a return gains nothing"),
        ],
    )
    def test_help_goes_on_between(self, fleet: Score, cycles_left: int, why: str) -> None:
        workers = (*side("abc", True, fleet.prefill), *side("d", False, fleet.decode))
        helping = {WorkerId("c"): Help(Role.PREFILL, cycles_left)}
        assert plan_switches(workers, fleet, Regime.IMBALANCED, helping) == [], why

    def test_no_more_return_than_it_takes(self) -> None:
        helping = {WorkerId("b"): Help(Role.PREFILL, 3), WorkerId("c"): Help(Role.PREFILL, 3)}
        workers = (*side("abc", True, 0.5), *side("xy", False, 0.9))
        switches = plan_switches(workers, Score(0.5, 0.9), Regime.IMBALANCED, helping)
        assert switches == [], "0.75 against 0.6 would be"
        switches = plan_switches(workers, Score(0.3, 0.9), Regime.IMBALANCED, helping)
        assert [s.worker_id for s in switches] == ["b"], "0.45 against 0.6 now"

    def test_a_helper_that_died_gets_no_signal(self) -> None:
        helping = {WorkerId("gone"): Help(Role.PREFILL, 0)}
        assert plan_switches(self.WORKERS, Score(0.1, 0.1), Regime.NORMAL, helping) == []


class TestScale:
    def test_overload_must_last(self) -> None:
        over = Score(2.0, 1.0)
        first = scale_signal(over, Regime.EXTREME, STEADY, now=0.0)
        assert (first.step, first.reason) == (0, ScaleReason.WAITING)
        still = scale_signal(over, Regime.EXTREME, first, now=59.0)
        assert still.step == 0
        due = scale_signal(over, Regime.EXTREME, still, now=60.0)
        assert (due.step, due.role, due.reason) == (1, Role.PREFILL, ScaleReason.OVERLOAD)
        again = scale_signal(over, Regime.EXTREME, due, now=61.0)
        assert again.step == 0, "one worker per hold time"

    def test_low_load_shrinks_the_idler_side(self) -> None:
        low = Score(0.1, 0.02)
        first = scale_signal(low, Regime.NORMAL, STEADY, now=0.0)
        due = scale_signal(low, Regime.NORMAL, first, now=60.0)
        assert (due.step, due.role, due.reason) == (-1, Role.DECODE, ScaleReason.LOW_LOAD)

    def test_a_break_starts_the_time_again(self) -> None:
        over = Score(2.0, 1.0)
        first = scale_signal(over, Regime.EXTREME, STEADY, now=0.0)
        calm = scale_signal(Score(0.5, 0.5), Regime.NORMAL, first, now=30.0)
        assert calm == STEADY
        assert scale_signal(over, Regime.EXTREME, calm, now=61.0).step == 0

    def test_another_side_starts_the_time_again(self) -> None:
        first = scale_signal(Score(2.0, 1.0), Regime.EXTREME, STEADY, now=0.0)
        other = scale_signal(Score(1.0, 2.0), Regime.EXTREME, first, now=60.0)
        assert (other.step, other.role, other.since) == (0, Role.DECODE, 60.0)
