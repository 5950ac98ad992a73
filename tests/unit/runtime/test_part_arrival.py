from __future__ import annotations

from kvmesh.core.types import KvLayout, RequestId
from kvmesh.engine.layer_gate import LayerGate
from kvmesh.kv.stages import Stage, plain_stages
from kvmesh.runtime.part_arrival import PartArrival
from kvmesh.transfer.frames import BlockPart

LAYOUT = KvLayout("f", "float32", 4, 3, 1, 8)
BLOCK = LAYOUT.block_bytes
LAYER = BLOCK // 3


def arrival(num_blocks: int = 2) -> PartArrival:
    return PartArrival(
        RequestId("r"),
        1,
        range(num_blocks),
        [0] * num_blocks,
        0,
        plain_stages(3, BLOCK),
        LayerGate(),
        lambda: None,
    )


def test_a_layer_has_come_when_all_blocks_have_it() -> None:
    part = arrival()
    part.wrote([0], BlockPart(0, LAYER))
    assert part.gate.num_stages == 0
    part.wrote([1], BlockPart(0, 2 * LAYER))
    assert part.gate.num_stages == 1
    part.wrote([0], BlockPart(LAYER, 2 * LAYER))
    assert part.gate.num_stages == 2
    assert not part.is_complete
    part.wrote([1], BlockPart(2 * LAYER, LAYER))
    assert part.gate.num_stages == 3
    assert part.is_complete


def test_whole_blocks_count_as_all_layers() -> None:
    part = arrival()
    part.wrote([0], None)
    part.wrote([1], BlockPart(0, LAYER))
    assert part.gate.num_stages == 1


def test_what_has_come_is_not_written_again() -> None:
    part = arrival()
    part.wrote([0, 1], BlockPart(0, LAYER))
    assert not part.may_write([1], BlockPart(0, LAYER))
    assert not part.may_write([0], None)
    assert part.may_write([0, 1], BlockPart(LAYER, LAYER))


def test_a_layer_that_comes_before_the_one_below_it_is_not_there() -> None:
    part = arrival()
    part.wrote([0, 1], BlockPart(LAYER, LAYER))
    assert part.gate.num_stages == 0
    part.wrote([0, 1], BlockPart(0, LAYER))
    assert part.gate.num_stages == 1


def test_stages_of_other_kinds_come_in_the_order_of_the_model() -> None:
    """Two linear layers, attention between them, and a window that nobody sees."""
    half = BLOCK // 2
    stages = (Stage(-1, 0, half), Stage(0, 0, BLOCK), Stage(1, 0, BLOCK), Stage(-1, half, half))
    kinds = [0, 0, -1]
    part = PartArrival(RequestId("r"), 1, [5, 6, 9], kinds, 0, stages, LayerGate(), lambda: None)
    part.wrote([0, 1], BlockPart(0, BLOCK))
    assert part.gate.num_stages == 0
    part.wrote([2], BlockPart(0, half))
    assert part.gate.num_stages == 3
    part.wrote([2], BlockPart(half, half))
    assert part.is_complete
