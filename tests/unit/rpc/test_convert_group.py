from __future__ import annotations

import dataclasses

import pytest

from kvmesh.core.errors import ProtocolError
from kvmesh.policy.group_life import GroupState, GroupWish, group_step
from kvmesh.rpc.convert_group import (
    MOST_WORKERS,
    group_view,
    state_word,
    stored_wish,
    wish_from_proto,
    wish_to_proto,
)
from kvmesh.v1 import scheduler_service_pb2 as pb

WISH = GroupWish("chat", "/m/two", 1, 2, 3, "", removing=True)


@pytest.mark.parametrize("opened", [None, "", "/m/one"])
def test_a_wish_there_and_back(opened: str | None) -> None:
    wish = dataclasses.replace(WISH, opened=opened)
    assert stored_wish(wish_to_proto(wish).SerializeToString()) == wish


@pytest.mark.parametrize(
    "message",
    [
        pb.GroupWish(prefill=1),
        pb.GroupWish(decode=1),
        pb.GroupWish(),
        pb.GroupWish(hybrid=MOST_WORKERS + 1),
    ],
)
def test_a_group_that_cannot_serve_is_refused(message: pb.GroupWish) -> None:
    with pytest.raises(ProtocolError):
        wish_from_proto(message)


def test_what_the_store_has_may_be_damaged() -> None:
    with pytest.raises(ProtocolError):
        stored_wish(b"\xff\xff\xff")


def test_every_state_but_the_last_has_a_word() -> None:
    wish = GroupWish("chat", prefill=1, decode=1)
    view = group_view(wish, group_step(wish, []), [], "")
    assert state_word(view.state) == GroupState.GATHERING.value
    assert state_word(pb.GROUP_STATE_UNSPECIFIED) == "unknown"
