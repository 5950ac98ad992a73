from __future__ import annotations

import pytest

from kvmesh.core.errors import ProtocolError
from kvmesh.core.slots import Publisher, Slot, SlotChange, SlotState
from kvmesh.core.types import WorkerId
from kvmesh.rpc.convert_slots import slot_change_from_proto, slot_change_to_proto
from kvmesh.v1 import kv_manager_service_pb2 as pb

WHOSE = Publisher(WorkerId("w"), 7, "east", "model")


@pytest.mark.parametrize(
    "change",
    [
        SlotChange(Slot("s"), WHOSE, SlotState.LIVE),
        SlotChange(Slot("s"), WHOSE, SlotState.LOADING, bytes(16)),
        SlotChange(Slot("s"), state=SlotState.ENDED),
        SlotChange(Slot("s"), stored=bytes(32), removed=b"x" * 16),
    ],
)
def test_round_trip(change: SlotChange) -> None:
    assert slot_change_from_proto(slot_change_to_proto(change)) == change


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ProtocolError, match="17 bytes"):
        slot_change_from_proto(pb.SlotChange(slot="s", stored=bytes(17)))
    with pytest.raises(ProtocolError, match="slot state 9"):
        slot_change_from_proto(pb.SlotChange.FromString(b"\x0a\x01s\x18\x09"))
