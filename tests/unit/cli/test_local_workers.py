from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.cli.local_workers import LocalWorkers
from kvmesh.cli.probes import Probe
from kvmesh.cli.processes import ProcessSpec
from kvmesh.cli.stack import Member
from kvmesh.core.launch import Launched, LaunchError, LaunchSpec
from kvmesh.core.types import Endpoint, Role, WorkerId


def member(name: str, launch: LaunchSpec | None) -> Member:
    probe = Probe("redis", Endpoint("127.0.0.1", 1))
    return Member(ProcessSpec(name, (), Path(), Path()), probe, probe, launch=launch)


class Stack:
    """Processes that are only written down."""

    def __init__(self) -> None:
        self.members = {"gateway": member("gateway", None)}
        self.killed: list[str] = []
        self.ending: set[str] = set()

    @property
    def names(self) -> set[str]:
        return self.members.keys() | self.ending

    def keep(self, one: Member) -> None:
        self.members[one.spec.name] = one

    async def let_go(self, name: str) -> None:
        del self.members[name]

    def kill(self, name: str) -> None:
        self.killed.append(name)


async def test_workers_come_and_go_under_the_first_free_name() -> None:
    stack = Stack()
    workers = LocalWorkers(stack, member)
    decode = LaunchSpec(Role.DECODE, "chat", "/m/two")
    names = [await workers.start(decode) for _ in range(2)]
    names.append(await workers.start(LaunchSpec(Role.PREFILL)))
    assert names == ["decode-0", "decode-1", "prefill-0"]
    await workers.stop(WorkerId("decode-0"))
    assert await workers.start(decode) == "decode-0"
    assert Launched(WorkerId("decode-1"), decode) in await workers.list()
    assert len(await workers.list()) == 3, "a gateway is no worker"
    assert await workers.restart(WorkerId("decode-1")) == "decode-1"
    assert stack.killed == ["decode-1"]


async def test_the_name_of_a_process_that_still_ends_is_not_free() -> None:
    stack = Stack()
    stack.ending = {"decode-0"}
    assert await LocalWorkers(stack, member).start(LaunchSpec(Role.DECODE)) == "decode-1"


@pytest.mark.parametrize("name", ["gateway", "decode-7"])
async def test_nobody_else_is_stopped_or_killed(name: str) -> None:
    workers = LocalWorkers(Stack(), member)
    for do in (workers.stop, workers.restart):
        with pytest.raises(LaunchError, match=f"{name} is no worker of this stack"):
            await do(WorkerId(name))
