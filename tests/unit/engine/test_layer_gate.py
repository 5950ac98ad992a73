from __future__ import annotations

import threading

from kvmesh.engine.layer_gate import LayerGate


def test_layers_that_arrived_are_not_waited_for() -> None:
    gate = LayerGate()
    gate.arrived(2)
    gate.arrived(1)  # a block of an earlier layer came late
    assert gate.wait(1)
    assert gate.wait(2)
    assert gate.num_layers == 2


def test_whoever_waits_goes_on_when_its_layer_arrives() -> None:
    gate = LayerGate()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(gate.wait(2)))
    thread.start()
    gate.arrived(1)
    assert not found
    gate.arrived(2)
    thread.join(10)
    assert found == [True]


def test_a_closed_gate_lets_through_only_what_had_arrived() -> None:
    gate = LayerGate()
    gate.arrived(1)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(gate.wait(2)))
    thread.start()
    gate.close()
    thread.join(10)
    assert found == [False]
    assert gate.wait(1)
