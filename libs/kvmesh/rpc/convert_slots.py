"""Converts changes of the kvmanager's slots to messages and back.

Tests: tests/unit/rpc/test_convert_slots.py.
"""

from __future__ import annotations

from kvmesh.core.errors import ProtocolError
from kvmesh.core.slots import Publisher, Slot, SlotChange, SlotState
from kvmesh.core.types import BLOCK_HASH_BYTES, WorkerId
from kvmesh.v1 import kv_manager_service_pb2 as pb

_STATES: dict[SlotState | None, pb.SlotState.ValueType] = {
    None: pb.SLOT_STATE_UNSPECIFIED,
    SlotState.LOADING: pb.SLOT_STATE_LOADING,
    SlotState.LIVE: pb.SLOT_STATE_LIVE,
    SlotState.ENDED: pb.SLOT_STATE_ENDED,
}
_STATES_BACK = {number: state for state, number in _STATES.items()}


def slot_change_to_proto(change: SlotChange) -> pb.SlotChange:
    """SlotChange as a message."""
    publisher = change.publisher
    hello = None
    if publisher is not None:
        hello = pb.PublisherHello(
            worker_id=publisher.worker_id,
            incarnation=publisher.incarnation,
            cluster=publisher.cluster,
            namespace=publisher.namespace,
        )
    return pb.SlotChange(
        slot=change.slot,
        publisher=hello,
        state=_STATES[change.state],
        stored=change.stored,
        removed=change.removed,
    )


def slot_change_from_proto(message: pb.SlotChange) -> SlotChange:
    """SlotChange from a message.

    Raises:
        ProtocolError: an unknown state, or incomplete hashes.
    """
    if message.state not in _STATES_BACK:
        raise ProtocolError("unknown_enum", f"slot state {message.state}")
    for joined in (message.stored, message.removed):
        if len(joined) % BLOCK_HASH_BYTES:
            raise ProtocolError("hash_length", f"{len(joined)} bytes of hashes")
    publisher = None
    if message.HasField("publisher"):
        hello = message.publisher
        publisher = Publisher(
            WorkerId(hello.worker_id), hello.incarnation, hello.cluster, hello.namespace
        )
    return SlotChange(
        Slot(message.slot),
        publisher,
        _STATES_BACK[message.state],
        message.stored,
        message.removed,
    )
