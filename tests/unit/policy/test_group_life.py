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

    def note(self, name: str, *, registered: bool | None = None, idle: bool | None = None) -> None:
        before = self.members[WorkerId(name)]
        self.members[WorkerId(name)] = GroupMember(
            before.launched,
            before.registered if registered is None else registered,
            before.idle if idle is None else idle,
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
    st.lists(
        st.sampled_from(["step", "load", "grow", "shrink", "upgrade", "lose", "busy"]), max_size=40
    )
)
@pytest.mark.filterwarnings("ignore")
def test_whatever_happens_it_ends_as_wished_and_serves_meanwhile(events: list[str]) -> None:
    group = ready()
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
        elif event == "load":
            group.load()
        group.step()
    for _ in range(4):
        group.load()
        for name in list(group.members):
            group.note(name, idle=True)
        group.step()
    assert group.step() is GroupState.READY
    specs = [each.launched.spec for each in group.members.values()]
    assert {spec.checkpoint for spec in specs} == {group.wish.checkpoint}
    assert [spec.role for spec in specs].count(Role.DECODE) == group.wish.decode
    assert all(len(each) <= 1 for each in group.serving_checkpoints)
