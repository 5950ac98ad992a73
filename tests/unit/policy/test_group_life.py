from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.launch import Launched, LaunchSpec
from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.group_life import (
    GroupMember,
    GroupState,
    GroupWish,
    group_step,
    is_member,
    wish_of,
)
from kvmesh.policy.peer_checks import CheckState

PENDING, VERIFIED, FAILED = CheckState.PENDING, CheckState.VERIFIED, CheckState.FAILED


class Group:
    """A group whose launcher does as it is told; workers load when the test says so."""

    def __init__(self, wish: GroupWish) -> None:
        self.wish = wish
        self.members: dict[WorkerId, GroupMember] = {}
        self.serving_checkpoints: list[set[str]] = []
        self._numbers = itertools.count()

    def step(self) -> GroupState:
        """One look of a scheduler, which may be another one each time."""
        step = group_step(self.wish, list(self.members.values()))
        if step.opens:
            self.check_open()
            self.wish = dataclasses.replace(self.wish, opened=self.wish.checkpoint)
        for name in step.stop:
            assert self.members[name].idle
            del self.members[name]
        for spec in step.start:
            name = WorkerId(f"{spec.role.value}-{next(self._numbers)}")
            self.members[name] = GroupMember(Launched(name, spec))
        again = group_step(self.wish, list(self.members.values()))
        self.serving_checkpoints.append(
            {
                each.launched.spec.checkpoint
                for each in self.members.values()
                if each.registered and each.name not in again.closed
            }
        )
        return step.state

    def check_open(self) -> None:
        """Those with which the entrance opens can serve; others are replaced by as many."""
        specs = {name: each.launched.spec for name, each in self.members.items()}
        connected = [
            specs[name].role
            for name, each in self.members.items()
            if each.is_connected and specs[name].checkpoint == self.wish.checkpoint
        ]
        assert set(connected) >= {Role.PREFILL, Role.DECODE} or Role.HYBRID in connected
        checkpoints = {spec.checkpoint for spec in specs.values()}
        if self.wish.opened is not None and len(checkpoints) > 1:
            counts = {role: self.wish.count(role) for role in connected}
            assert all(connected.count(role) >= count for role, count in counts.items())

    def note(
        self,
        name: str,
        *,
        registered: bool | None = None,
        idle: bool | None = None,
        peers: CheckState | None = None,
    ) -> None:
        before = self.members[WorkerId(name)]
        self.members[WorkerId(name)] = GroupMember(
            before.launched,
            before.registered if registered is None else registered,
            before.idle if idle is None else idle,
            before.peers if peers is None else peers,
        )

    def load(self) -> None:
        for name in self.members:
            self.note(name, registered=True)

    def names(self) -> set[str]:
        return set(self.members)


TWO = GroupWish("chat", "/m/one", prefill=1, decode=1)


def ready(wish: GroupWish = TWO) -> Group:
    group = Group(wish)
    group.step()
    group.load()
    group.step()
    assert group.step() is GroupState.READY
    return group


def test_nobody_serves_before_all_are_there() -> None:
    group = Group(TWO)
    assert group.step() is GroupState.GATHERING
    assert group.names() == {"prefill-0", "decode-1"}
    group.note("prefill-0", registered=True)
    assert group.step() is GroupState.GATHERING
    assert group.serving_checkpoints[-1] == set()
    group.note("decode-1", registered=True)
    group.step()
    assert group.serving_checkpoints[-1] == {"/m/one"}
    assert group.step() is GroupState.READY
    assert group.names() == {"prefill-0", "decode-1"}


def loaded(wish: GroupWish = TWO, **peers: CheckState) -> Group:
    """All are there; roles that are named are connected like that."""
    group = Group(wish)
    group.step()
    for name in group.names():
        group.note(name, registered=True, peers=peers.get(name.partition("-")[0], VERIFIED))
    return group


def test_the_entrance_opens_when_peers_are_connected() -> None:
    group = loaded(decode=PENDING)
    assert group.step() is GroupState.CONNECTING
    group.note("decode-1", peers=FAILED)
    assert group.step() is GroupState.CONNECTING
    assert group.serving_checkpoints[-1] == set()
    group.note("decode-1", peers=VERIFIED)
    group.step()
    assert group.step() is GroupState.READY
    assert group.serving_checkpoints[-1] == {"/m/one"}


def test_a_worker_that_cannot_be_connected_does_not_hold_up_the_group() -> None:
    group = loaded(dataclasses.replace(TWO, decode=2))
    group.note("decode-1", peers=FAILED)
    group.note("decode-2", peers=PENDING)
    assert group.step() is GroupState.CONNECTING, "its first result is awaited"
    group.note("decode-2", peers=VERIFIED)
    group.step()
    assert group.step() is GroupState.CHANGING, "it serves, and is not as wished"
    group.wish = dataclasses.replace(group.wish, decode=1)
    group.step()
    assert group.names() == {"prefill-0", "decode-2"}, "that one is given up first"
    assert group.step() is GroupState.READY


def test_a_group_without_a_connected_pair_does_not_open_and_hybrids_need_none() -> None:
    assert loaded(prefill=FAILED).step() is GroupState.CONNECTING
    both = GroupWish("chat", "/m/one", hybrid=1, prefill=1)
    group = loaded(both, prefill=FAILED)
    group.step()
    assert group.step() is GroupState.CHANGING
    assert group.serving_checkpoints[-1] == {"/m/one"}


def test_an_open_group_whose_workers_lose_each_other_says_so() -> None:
    group = ready()
    group.note("decode-1", peers=FAILED)
    assert group.step() is GroupState.CONNECTING
    group.note("decode-1", peers=VERIFIED)
    assert group.step() is GroupState.READY


def test_an_upgrade_takes_over_only_when_all_new_workers_are_connected() -> None:
    group = ready(dataclasses.replace(TWO, decode=2))
    group.wish = dataclasses.replace(group.wish, checkpoint="/m/two")
    group.step()
    group.load()
    group.note("decode-4", peers=FAILED)
    for _ in range(3):
        assert group.step() is GroupState.UPGRADING
        assert group.serving_checkpoints[-1] == {"/m/one"}
    group.note("decode-4", peers=VERIFIED)
    group.step()
    assert group.step() is GroupState.READY
    assert group.serving_checkpoints[-1] == {"/m/two"}


def test_a_group_that_connects_can_be_removed() -> None:
    group = loaded(decode=FAILED)
    group.wish = dataclasses.replace(group.wish, removing=True)
    group.step()
    assert group.step() is GroupState.GONE


def test_who_is_lost_later_closes_nobody_else() -> None:
    group = ready()
    group.note("decode-1", registered=False)
    assert group.step() is GroupState.CHANGING
    assert group_step(group.wish, list(group.members.values())).closed == frozenset()


def test_the_last_ones_go_and_none_before_its_work_is_done() -> None:
    group = ready(dataclasses.replace(TWO, decode=3))
    group.note("decode-3", idle=False)
    group.wish = dataclasses.replace(group.wish, decode=1)
    assert group.step() is GroupState.CHANGING
    assert group.names() == {"prefill-0", "decode-1", "decode-3"}
    assert "decode-3" in group_step(group.wish, list(group.members.values())).closed
    group.note("decode-3", idle=True)
    group.step()
    assert group.step() is GroupState.READY
    assert group.names() == {"prefill-0", "decode-1"}


def test_who_is_away_goes_before_who_is_there() -> None:
    group = ready(dataclasses.replace(TWO, decode=2))
    group.note("decode-1", registered=False)
    group.wish = dataclasses.replace(group.wish, decode=1)
    group.step()
    assert group.names() == {"prefill-0", "decode-2"}


def test_an_upgrade_serves_one_checkpoint_at_a_time_and_always_one() -> None:
    group = ready()
    group.note("decode-1", idle=False)
    group.wish = dataclasses.replace(group.wish, checkpoint="/m/two")
    began = len(group.serving_checkpoints)
    assert group.step() is GroupState.UPGRADING
    assert len(group.members) == 4
    group.load()
    group.note("decode-1", idle=False)
    group.step()
    assert "decode-1" in group.names(), "its streams end there, and nowhere else"
    assert group.step() is GroupState.UPGRADING
    group.note("decode-1", idle=True)
    group.step()
    assert group.step() is GroupState.READY
    assert group.names() == {"prefill-2", "decode-3"}
    assert all(len(each) == 1 for each in group.serving_checkpoints[began:])


def test_an_upgrade_that_is_called_off_goes_back() -> None:
    group = ready()
    group.wish = dataclasses.replace(group.wish, checkpoint="/m/two")
    group.step()
    group.load()
    group.wish = dataclasses.replace(group.wish, checkpoint="/m/one")
    group.step()
    assert group.step() is GroupState.READY
    assert group.names() == {"prefill-0", "decode-1"}


def test_a_group_that_is_removed_is_gone_in_the_end() -> None:
    group = ready()
    group.note("decode-1", idle=False)
    group.wish = dataclasses.replace(group.wish, removing=True)
    assert group.step() is GroupState.DRAINING
    assert group.names() == {"decode-1"}
    group.note("decode-1", idle=True)
    group.step()
    assert group.step() is GroupState.GONE


def test_workers_that_were_there_from_the_start_are_a_group_that_is_open() -> None:
    kept = [
        Launched(WorkerId("prefill-0"), LaunchSpec(Role.PREFILL)),
        Launched(WorkerId("decode-0"), LaunchSpec(Role.DECODE)),
        Launched(WorkerId("decode-1"), LaunchSpec(Role.DECODE)),
        Launched(WorkerId("spare-0"), LaunchSpec(Role.SPARE)),
        Launched(WorkerId("decode-2"), LaunchSpec(Role.DECODE, "chat")),
        Launched(WorkerId("decode-3"), LaunchSpec(Role.DECODE, model="other")),
    ]
    assert wish_of(kept, "") == GroupWish("", "", 1, 2, 0, opened="")
    assert wish_of(kept, "doc") == GroupWish("doc", opened=None)
    assert wish_of(kept, "chat") == GroupWish("chat", "", 0, 1, 0, opened="")
    assert [each.worker_id for each in kept if not is_member(each)] == ["spare-0", "decode-3"]


def test_one_more_or_less_of_one_side_changes_nothing_else() -> None:
    wish = GroupWish("chat", "/m/two", 1, 2, 3, opened="/m/two")
    assert wish.with_more(Role.PREFILL, 1) == dataclasses.replace(wish, prefill=2)
    assert wish.with_more(Role.DECODE, -1) == dataclasses.replace(wish, decode=1)
    assert wish.with_more(Role.HYBRID, 2) == dataclasses.replace(wish, hybrid=5)


@given(
    st.booleans(),
    st.lists(
        st.sampled_from(
            ["step", "load", "grow", "shrink", "upgrade", "lose", "busy", "cut", "try", "join"]
        ),
        max_size=40,
    ),
)
@pytest.mark.filterwarnings("ignore")
def test_whatever_happens_it_ends_as_wished_and_serves_meanwhile(
    is_new: bool, events: list[str]
) -> None:
    group = Group(TWO) if is_new else ready()
    group.step()
    for number, event in enumerate(events):
        wish, names = group.wish, sorted(group.members)
        if event == "grow":
            group.wish = dataclasses.replace(wish, decode=wish.decode + 1)
        elif event == "shrink":
            group.wish = dataclasses.replace(wish, decode=max(1, wish.decode - 1))
        elif event == "upgrade":
            group.wish = dataclasses.replace(wish, checkpoint=f"/m/{number % 3}")
        elif event == "lose":
            group.note(names[number % len(names)], registered=False)
        elif event == "busy":
            group.note(names[number % len(names)], idle=False)
        elif event in ("cut", "try", "join"):
            state = {"cut": FAILED, "try": PENDING, "join": VERIFIED}[event]
            group.note(names[number % len(names)], peers=state)
        elif event == "load":
            group.load()
        group.step()
    for _ in range(4):
        group.load()
        for name in list(group.members):
            group.note(name, idle=True, peers=VERIFIED)
        group.step()
    assert group.step() is GroupState.READY
    specs = [each.launched.spec for each in group.members.values()]
    assert {spec.checkpoint for spec in specs} == {group.wish.checkpoint}
    assert [spec.role for spec in specs].count(Role.DECODE) == group.wish.decode
    assert all(len(each) <= 1 for each in group.serving_checkpoints)
