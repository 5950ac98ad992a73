"""Converts groups to messages and back. Tests: tests/unit/rpc/test_convert_group.py."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from kvmesh.core.errors import ProtocolError
from kvmesh.policy.group_life import GroupMember, GroupState, GroupStep, GroupWish
from kvmesh.rpc.convert_worker import role_to_proto
from kvmesh.v1 import scheduler_service_pb2 as pb

MOST_WORKERS = 1024
"""Maximum number of workers of one role in a group; more are probably a typing error."""

_STATES = {
    GroupState.GATHERING: pb.GROUP_STATE_GATHERING,
    GroupState.CONNECTING: pb.GROUP_STATE_CONNECTING,
    GroupState.READY: pb.GROUP_STATE_READY,
    GroupState.CHANGING: pb.GROUP_STATE_CHANGING,
    GroupState.UPGRADING: pb.GROUP_STATE_UPGRADING,
    GroupState.DRAINING: pb.GROUP_STATE_DRAINING,
}


def wish_to_proto(wish: GroupWish) -> pb.GroupWish:
    """GroupWish as a message."""
    return pb.GroupWish(
        scenario=wish.scenario,
        checkpoint=wish.checkpoint,
        prefill=wish.prefill,
        decode=wish.decode,
        hybrid=wish.hybrid,
        removing=wish.removing,
        opened=wish.opened,
    )


def wish_from_proto(message: pb.GroupWish) -> GroupWish:
    """GroupWish from a message.

    Raises:
        ProtocolError: it asks for too many workers, or for workers that cannot serve.
    """
    counts = (message.prefill, message.decode, message.hybrid)
    if max(counts) > MOST_WORKERS:
        raise ProtocolError("bad_group", f"{max(counts)} workers of a role; {MOST_WORKERS} at most")
    serves = message.hybrid or (message.prefill and message.decode)
    if not (serves or message.removing):
        text = "a group needs a prefill and a decode worker, or a hybrid one; or remove it"
        raise ProtocolError("bad_group", text)
    return GroupWish(
        message.scenario,
        message.checkpoint,
        *counts,
        opened=message.opened if message.HasField("opened") else None,
        removing=message.removing,
    )


def stored_wish(payload: bytes) -> GroupWish:
    """GroupWish from the store's bytes.

    Raises:
        ProtocolError: the bytes are no GroupWish.
    """
    try:
        return wish_from_proto(pb.GroupWish.FromString(payload))
    except DecodeError as error:
        raise ProtocolError("bad_group", str(error)) from error


def group_view(
    wish: GroupWish, step: GroupStep, members: list[GroupMember], problem: str
) -> pb.GroupView:
    """A group as a message for people."""
    workers = [
        pb.GroupWorker(
            worker_id=each.name,
            role=role_to_proto(each.launched.spec.role),
            checkpoint=each.launched.spec.checkpoint,
            registered=each.registered,
            closed=each.name in step.closed,
            connecting=each.registered and not each.is_connected,
        )
        for each in members
    ]
    state = _STATES.get(step.state, pb.GROUP_STATE_DRAINING)
    return pb.GroupView(wish=wish_to_proto(wish), state=state, workers=workers, problem=problem)


def state_word(state: pb.GroupState.ValueType) -> str:
    """The word for a group's state, for people."""
    return next((each.value for each, value in _STATES.items() if value == state), "unknown")
