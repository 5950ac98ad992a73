"""Greetings of data channels in a mesh with a secret."""

from __future__ import annotations

import dataclasses

from kvmesh.core.mesh_secret import MeshSecret
from kvmesh.core.types import KvLayout, WorkerId
from kvmesh.transfer.frames import Checksum, ErrorFrame, HelloFrame, HelloOkFrame, LinkOffer
from kvmesh.transfer.protocol import ChannelIdentity, ReceiverMachine, Reply
from kvmesh.transfer.sender_protocol import SenderMachine

LAYOUT = KvLayout("model", "bfloat16", 16, 2, 2, 8)
SECRET = MeshSecret("of this mesh, thirty-two characters")
OTHER = MeshSecret("of another mesh, thirty-two characters")


def _hello_of(secret: MeshSecret | None, life: int = 7) -> HelloFrame:
    me = ChannelIdentity(WorkerId("p0"), 3, LAYOUT, secret)
    return SenderMachine(me, WorkerId("d0"), life, LinkOffer(9, 0, Checksum.NONE)).hello()


def test_a_receiver_with_a_secret_takes_greetings_of_its_mesh_alone() -> None:
    member = _hello_of(SECRET)
    other_lane = LinkOffer(9, 1, Checksum.NONE)
    greetings = {
        "member": (member, True),
        "nobody": (_hello_of(None), False),
        "stranger": (_hello_of(OTHER), False),
        "captured, of another lane": (dataclasses.replace(member, link=other_lane), False),
        "captured, in another's name": (
            dataclasses.replace(member, worker_id=WorkerId("p1")),
            False,
        ),
        # Which life this is, only members are told.
        "to another life": (_hello_of(OTHER, life=6), False),
        "cut": (dataclasses.replace(member, proof=member.proof[:16]), False),
    }
    for who, (hello, is_let_in) in greetings.items():
        machine = ReceiverMachine(ChannelIdentity(WorkerId("d0"), 7, LAYOUT, SECRET))
        action = machine.receive(hello)
        assert isinstance(action, Reply)
        assert isinstance(action.frame, HelloOkFrame if is_let_in else ErrorFrame), who
        assert action.close is not is_let_in
        if isinstance(action.frame, ErrorFrame):
            assert action.frame.reason == "secret"
            assert "d0" not in action.frame.message


def test_a_greeting_to_an_earlier_life_is_good_for_that_life_alone() -> None:
    machine = ReceiverMachine(ChannelIdentity(WorkerId("d0"), 8, LAYOUT, SECRET))
    action = machine.receive(_hello_of(SECRET, life=7))
    assert isinstance(action, Reply)
    assert isinstance(action.frame, ErrorFrame)
    assert action.frame.reason == "identity"
    forged = dataclasses.replace(_hello_of(SECRET, life=7), peer_incarnation=8)
    action = machine.receive(forged)
    assert isinstance(action, Reply)
    assert isinstance(action.frame, ErrorFrame)
    assert action.frame.reason == "secret"


def test_a_receiver_without_a_secret_takes_members_of_any_mesh() -> None:
    machine = ReceiverMachine(ChannelIdentity(WorkerId("d0"), 7, LAYOUT))
    action = machine.receive(_hello_of(SECRET))
    assert isinstance(action, Reply)
    assert isinstance(action.frame, HelloOkFrame)
