"""Ranks on another host: they begin and end with their leader. Here they are small programs."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.core.mesh_secret import new_secret
from kvmesh.engine.rank_host import Builds, RankHost
from kvmesh.engine.rank_join import Credentials, Join, join_message, read_join
from kvmesh.engine.rank_lines import LineKind, RankGate, RefusedLineError
from kvmesh.engine.vllm_messages import EngineRequest, Place
from kvmesh.engine.vllm_ranks import Ranks
from kvmesh.rpc.channels import PeerTls
from tests.waiting import until

HOST = "127.0.0.1"
BUILDS = Builds("0123", "0.31.0")
REQUEST = EngineRequest(
    Path("/model"), "float32", 10, 32, 0, 512, 64, num_ranks=4, num_hosts=2, device=0
)
_PROGRAM = """
import json, os, socket, sys, threading
from kvmesh.engine.rank_join import read_join
from kvmesh.engine.rank_lines import LineKind
from kvmesh.engine.vllm_messages import read_request, receive
from kvmesh.engine import vllm_follower
threading.Thread(target=vllm_follower._end_with_starter, daemon=True).start()
starter = socket.socket(fileno=int(sys.argv[2]))
message = receive(starter)
join = read_join(message)
leader = starter
if join is not None:
    leader = join.dial(LineKind.STEPS)
    message = receive(leader)
request, place = read_request(message)
if join is not None:
    place = place.meets_at(join.leader)
told = [place.rank, place.local, place.meeting, receive(leader), os.getpid()]
with open(os.path.join(sys.argv[1], str(place.rank)), "w") as out:
    json.dump(told, out)
os.rename(out.name, out.name + ".said")
while True:  # as a rank that waits for one that is gone
    pass
"""


class Stage:
    """A leader of two ranks, and a host with two more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.credentials = Credentials(PeerTls(), secret=new_secret())
        self.gate = RankGate(
            HOST, 0, self.credentials.access(), num_hosts=2, host_ranks=2, told=asdict(BUILDS)
        )
        self.command = (sys.executable, "-c", _PROGRAM, str(folder))
        self.lost = threading.Event()
        self.hosts: list[tuple[RankHost, threading.Thread]] = []
        self.errors: list[BaseException] = []
        self.leader: Ranks | None = None

    def host(self, number: int = 1, builds: Builds = BUILDS) -> tuple[RankHost, threading.Thread]:
        """Starts a host, which serves one life of the leader."""
        join = Join(HOST, self.gate.port, 0, Path("/there"), 3, self.credentials)
        made = RankHost(number, join, builds, command=self.command, again_s=0.05)

        def run() -> None:
            try:
                made.run()
            except ConfigError as error:
                self.errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self.hosts.append((made, thread))
        return made, thread

    def lead(self) -> Ranks:
        """The leader, which waits for the host."""
        self.leader = Ranks(REQUEST, command=self.command, on_lost=self.lost.set, gate=self.gate)
        return self.leader

    async def said(self) -> list[list[object]]:
        """What each rank has been told."""
        assert self.leader is not None
        self.leader.tell({"tokens": [1]})
        paths = [self.folder / f"{rank}.said" for rank in (1, 2, 3)]
        await until(lambda: all(path.exists() for path in paths), "all have written")
        return [json.loads(path.read_text()) for path in paths]

    def close(self) -> None:
        """Ends all."""
        self.gate.close()
        if self.leader is not None:
            self.leader.close()
        for host, thread in self.hosts:
            host.close()
            thread.join(10.0)
            assert not thread.is_alive()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def is_running(pid: object) -> bool:
    """Whether a process is there."""
    return Path(f"/proc/{pid}").exists()


async def test_ranks_of_both_hosts_hear_the_leader_and_end_with_it(stage: Stage) -> None:
    _, thread = stage.host()
    leader = stage.lead()
    said = await stage.said()
    assert [(rank, local, told) for rank, local, _, told, _ in said] == [
        (1, 1, {"tokens": [1]}),
        (2, 0, {"tokens": [1]}),
        (3, 1, {"tokens": [1]}),
    ]
    # No two end alike: vLLM would take them for neighbours that share memory.
    meetings = [leader.place.meeting, *(str(meeting) for _, _, meeting, _, _ in said)]
    assert len(set(meetings)) == 4
    assert len({meeting.partition("?")[0] for meeting in meetings}) == 1
    assert len(leader.pids) == 1
    leader.close()
    thread.join(10.0)
    assert not any(is_running(pid) for *_, pid in said)
    assert not stage.lost.is_set()


@pytest.mark.parametrize("which", [2, 1])
async def test_a_lost_rank_of_the_other_host_ends_all(stage: Stage, which: int) -> None:
    _, thread = stage.host()
    stage.lead()
    said = await stage.said()
    pids = [int(str(pid)) for *_, pid in said]
    os.kill(pids[which], signal.SIGKILL)
    await until(stage.lost.is_set, "the leader is told", 3.0)
    thread.join(10.0)
    assert not any(is_running(pid) for pid in pids[1:])


async def test_a_host_that_ends_is_noticed(stage: Stage) -> None:
    host, thread = stage.host()
    stage.lead()
    await stage.said()
    host.close()
    await until(stage.lost.is_set, "the leader is told", 3.0)
    thread.join(10.0)


async def test_a_leader_that_comes_later_is_waited_for(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    port = stage.gate.port
    stage.gate.close()
    with caplog.at_level("INFO"):
        stage.host()
        await until(lambda: "waiting_for_leader" in caplog.text, "it waits")
    stage.gate = RankGate(
        HOST, port, stage.credentials.access(), num_hosts=2, host_ranks=2, told=asdict(BUILDS)
    )
    stage.lead()
    assert len(await stage.said()) == 3


def test_a_host_that_leaves_waits_no_longer(stage: Stage) -> None:
    stage.gate.close()
    host, thread = stage.host()
    host.leave()
    thread.join(10.0)
    assert not thread.is_alive()


async def test_a_host_that_leaves_serves_its_leader_to_the_end(stage: Stage) -> None:
    host, thread = stage.host()
    leader = stage.lead()
    host.leave()
    assert len(await stage.said()) == 3
    assert thread.is_alive()
    leader.close()
    thread.join(10.0)
    assert host.is_leaving
    assert not stage.lost.is_set()


@pytest.mark.parametrize(
    ("builds", "reason"),
    [
        (replace(BUILDS, vllm="0.32.0"), "the leader has vLLM 0.31.0, and this host 0.32.0"),
        (replace(BUILDS, checkpoint="4567"), "another checkpoint than the leader's"),
    ],
)
def test_hosts_that_would_compute_something_else_are_refused(
    stage: Stage, builds: Builds, reason: str
) -> None:
    _, thread = stage.host(builds=builds)
    thread.join(10.0)
    (error,) = stage.errors
    assert reason in str(error)


def test_a_number_that_the_engine_lacks_is_refused(stage: Stage) -> None:
    _, thread = stage.host(number=2)
    thread.join(10.0)
    (error,) = stage.errors
    assert isinstance(error, RefusedLineError)


def test_a_leader_that_fails_before_all_are_there_leaves_nothing(stage: Stage) -> None:
    """A rank that was announced does not connect."""
    taken = stage.gate.take

    def take(kind: LineKind, number: int, timeout_s: float) -> socket.socket | None:
        return None if kind is LineKind.STEPS else taken(kind, number, timeout_s)

    stage.gate.take = take  # type: ignore[method-assign]
    _, thread = stage.host()
    with pytest.raises(ConfigError, match="rank 2 did not connect within 60 s"):
        stage.lead()
    thread.join(10.0)
    assert not thread.is_alive()


def test_what_a_rank_is_told_is_what_it_reads() -> None:
    shown = Credentials(PeerTls(ca="/ca.pem", peer_name="mesh"), ("prefill",), "/secret", "")
    join = Join("::1", 7003, 5, Path("/there"), None, shown)
    assert read_join(json.loads(json.dumps(join_message(join), default=str))) == join
    assert read_join({"request": {}}) is None
    assert "hidden" not in repr(Credentials(PeerTls(), secret="hidden"))


def test_places_to_meet_name_the_leader_as_each_host_knows_it() -> None:
    place = Place(1, "tcp://leader:29500?of=1", 0)
    assert place.meets_at("10.0.0.7").meeting == "tcp://10.0.0.7:29500?of=1"
    assert place.meets_at("fd00::7").meeting == "tcp://[fd00::7]:29500?of=1"
    assert Place(1, "file:///tmp/leader").meets_at("x").meeting == "file:///tmp/leader"
