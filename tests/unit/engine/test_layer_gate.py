from __future__ import annotations

from kvmesh.engine.layer_gate import LayerGate


def test_stages_that_arrived_are_not_waited_for() -> None:
    gate = LayerGate()
    gate.arrived(2)
    gate.arrived(1)  # a block of an earlier stage came late
    assert gate.passes(1)
    assert gate.passes(2)
    assert gate.num_stages == 2


def test_what_may_still_come_is_neither_there_nor_lost() -> None:
    changes: list[int] = []
    gate = LayerGate(lambda: changes.append(gate.num_stages))
    assert gate.passes(1) is None
    gate.arrived(1)
    assert gate.passes(1) is True
    assert gate.passes(2) is None
    gate.arrived(2)
    assert changes == [1, 2], "whoever plans steps is woken"


def test_a_closed_gate_lets_through_only_what_had_arrived() -> None:
    gate = LayerGate()
    gate.arrived(1)
    gate.close()
    assert gate.passes(2) is False
    assert gate.passes(1) is True
