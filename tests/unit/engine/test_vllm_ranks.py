"""How a leader starts, tells and ends its ranks; the ranks here are small programs without vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.engine.adapters import Adapter
from kvmesh.engine.host_memory import HostMemory
from kvmesh.engine.vllm_messages import (
    EngineRequest,
    KnownSequence,
    NewSequence,
    Place,
    VllmStep,
    adding_message,
    encoded,
    read_change,
    read_request,
    read_step,
    receive,
    removing_message,
    request_message,
    step_message,
)
from kvmesh.engine.vllm_ranks import Ranks
from tests.waiting import until

REQUEST = EngineRequest(
    folder=Path("/model"),
    dtype="float32",
    num_blocks=10,
    block_size=32,
    max_model_len=0,
    max_tokens=512,
    max_sequences=64,
    adapters=(Adapter("sql", Path("/sql"), 8, "0123"),),
    num_ranks=3,
)
_PROGRAM = """
import json, os, socket, sys, threading
from kvmesh.engine.vllm_memory import FollowerCache
from kvmesh.engine.vllm_messages import receive
from kvmesh.engine import vllm_follower
threading.Thread(target=vllm_follower._end_with_starter, daemon=True).start()
leader = socket.socket(fileno=int(sys.argv[2]))
place = receive(leader)
FollowerCache(leader, None).allocate(4096)[place["rank"]] = 7
with open(os.path.join(sys.argv[1], str(place["rank"])), "w") as out:
    print(json.dumps([place, receive(leader)]), file=out)
os.rename(out.name, out.name + ".said")
while True:  # as a rank that waits for one that is gone
    pass
"""


@pytest.fixture
def lost() -> threading.Event:
    return threading.Event()


@pytest.fixture
def ranks(tmp_path: Path, lost: threading.Event) -> Iterator[Ranks]:
    command = (sys.executable, "-c", _PROGRAM, str(tmp_path))
    made = Ranks(REQUEST, command=command, on_lost=lost.set)
    yield made
    made.close()


def test_what_is_told_is_what_is_read() -> None:
    place = Place(1, "/there")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encoded(request_message(REQUEST, place)) + encoded({}))
        assert read_request(receive(theirs)) == (REQUEST, place)
        step = VllmStep(
            [NewSequence("1.0", [5, 6], [[3], [4]], 0, "sql")],
            [KnownSequence("2.1", [[], []], 40, 3), KnownSequence("3.1", [[9], []], 32, 0)],
            {"0.0"},
            {"1.0": 2, "2.1": 1, "3.1": 1},
        )
        assert receive(theirs) == {}
        ours.sendall(encoded(step_message(step)))
        told = receive(theirs)
        assert (read_change(told), read_step(told)) == (None, step)
        (adapter,) = REQUEST.adapters
        ours.sendall(encoded(adding_message(adapter)) + encoded(removing_message(adapter.id)))
        assert [read_change(receive(theirs)) for _ in range(2)] == [adapter, adapter.id]
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs)


async def test_each_rank_has_its_place_the_pool_and_every_message(
    ranks: Ranks, tmp_path: Path, lost: threading.Event
) -> None:
    met = Path(ranks.place.meeting.removeprefix("file://"))
    names = sorted(each.name for each in met.parent.iterdir())
    assert names == [f"{met.name}-1", f"{met.name}-2"]  # no memory is shared between them
    pool = HostMemory(1, 4096)
    ranks.allow_cache(pool.view.nbytes, pool.fd)
    ranks.loaded()
    ranks.tell({"tokens": [1, 2]})
    said = [tmp_path / "1.said", tmp_path / "2.said"]
    await until(lambda: all(each.exists() for each in said), "both have written")
    assert bytes(pool.view[:4]) == bytes([0, 7, 7, 0])
    for rank, path in enumerate(said, 1):
        message, told = json.loads(path.read_text())
        request, place = read_request(message)
        assert (request, place.rank, told) == (REQUEST, rank, {"tokens": [1, 2]})
    pids = ranks.pids
    ranks.close()
    assert_gone([met.parent, *(Path(f"/proc/{pid}") for pid in pids)])
    assert not lost.is_set()


def assert_gone(paths: Sequence[Path]) -> None:
    """Nothing is left of the ranks."""
    assert not any(path.exists() for path in paths)


async def test_ranks_that_spin_meet_under_one_name(tmp_path: Path) -> None:
    command = (sys.executable, "-c", _PROGRAM, str(tmp_path))
    made = Ranks(replace(REQUEST, num_ranks=2, spin=True), command=command)
    pool = HostMemory(1, 4096)
    made.allow_cache(pool.view.nbytes, pool.fd)
    made.tell({})
    await until((tmp_path / "1.said").exists, "it has written")
    message, _ = json.loads((tmp_path / "1.said").read_text())
    assert message["meeting"] == made.place.meeting
    made.close()


async def test_a_rank_that_ends_is_noticed(ranks: Ranks, lost: threading.Event) -> None:
    os.kill(ranks.pids[1], signal.SIGKILL)
    await until(lost.is_set, "its loss is told")


def test_an_engine_of_one_rank_starts_none() -> None:
    alone = Ranks(replace(REQUEST, num_ranks=1))
    alone.tell({"tokens": [1]})
    assert alone.pids == []
    alone.close()
