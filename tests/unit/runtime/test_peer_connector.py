from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.peers import Peer
from kvmesh.core.types import Endpoint, HostRoute, Refusal, RefusalReason, WorkerId
from kvmesh.runtime import peer_connector
from kvmesh.runtime.peer_connector import MAX_AT_ONCE, PeerConnector
from tests.waiting import until

HERE = HostRoute("host", "/run/kv.sock")


def peer(name: str, incarnation: int = 1) -> Peer:
    return Peer(WorkerId(name), incarnation, Endpoint("10.0.0.1", 9000))


class Network:
    """Peers that answer, refuse, or are not there."""

    def __init__(self, me: str = "p0") -> None:
        self.down: set[str] = set()
        self.refusing: set[str] = set()
        self.hanging = asyncio.Event()
        self.hanging.set()
        self.order: list[str] = []
        self.num_open = self.most_open = self.num_news = 0
        self.connector = PeerConnector(WorkerId(me), self.open, self.noted)

    def noted(self) -> None:
        self.num_news += 1

    async def open(self, peer: Peer) -> None:
        self.order.append(peer.worker_id)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self.hanging.wait()
            await asyncio.sleep(0)
        finally:
            self.num_open -= 1
        if peer.worker_id in self.down:
            raise LostError("data channel: refused")
        if peer.worker_id in self.refusing:
            raise RefusedError(Refusal(RefusalReason.INVALID, "secret: another one"))

    def problems(self) -> dict[str, str]:
        return {each.worker_id: each.problem for each in self.connector.report().checks}

    async def told(self, **problems: str) -> None:
        await until(lambda: self.problems() == problems, f"{problems}")


@contextlib.asynccontextmanager
async def connecting(network: Network) -> AsyncIterator[PeerConnector]:
    task = asyncio.create_task(network.connector.run())
    yield network.connector
    task.cancel()
    await asyncio.wait({task})
    assert network.num_open == 0, "nothing goes on"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connector, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(peer_connector, "MAX_PAUSE_S", 0.02)


async def test_each_peer_is_reached_or_its_problem_is_told_until_it_is_gone() -> None:
    network = Network()
    network.down, network.refusing = {"d1"}, {"d2"}
    async with connecting(network) as connector:
        connector.host_route = HERE
        connector.name("a", (peer("d0"), peer("d1"), peer("d2")))
        await until(lambda: len(network.problems()) == 3, "all were tried")
        problems = network.problems()
        assert problems["d0"] == ""
        assert problems["d1"] == "10.0.0.1:9000: data channel: refused"
        assert problems["d2"].endswith("secret: another one")
        assert connector.report().host_route == HERE
        network.down.clear()
        network.refusing.clear()
        await network.told(d0="", d1="", d2="")
        count = Counter(network.order)
        assert count["d0"] == 1, "whoever is connected is left alone"
        assert min(count["d1"], count["d2"]) >= 2
        assert network.num_news == 5, "the same again is no news"


async def order_of(me: str, names: list[str]) -> list[str]:
    """In which order a worker connects to its peers."""
    network = Network(me)
    network.hanging.clear()
    async with connecting(network) as connector:
        connector.name("a", tuple(peer(each) for each in names))
        await until(lambda: network.num_open == MAX_AT_ONCE, "as many as may")
        network.hanging.set()
        await until(lambda: len(network.problems()) == len(names), "all are reached")
    assert network.most_open == MAX_AT_ONCE
    return network.order


async def test_only_some_connections_are_opened_at_once_and_in_another_order_elsewhere() -> None:
    names = [f"d{number}" for number in range(40)]
    one, other = await order_of("p0", names), await order_of("p1", names)
    assert sorted(one) == sorted(other) == sorted(names)
    assert one != other


async def test_what_one_of_two_schedulers_names_is_connected_and_its_next_life_is_too() -> None:
    network = Network()
    async with connecting(network) as connector:
        connector.name("a", (peer("d0"),))
        connector.name("b", (peer("d0"), peer("d1")))
        await network.told(d0="", d1="")
        connector.name("a", (peer("d0", incarnation=2),))
        connector.name("b", (peer("d0", incarnation=2), peer("d1")))
        await until(
            lambda: {each.incarnation for each in connector.report().checks} == {1, 2}, "both lives"
        )
        assert Counter(network.order) == {"d0": 2, "d1": 1}


async def test_a_scheduler_that_has_just_started_hears_of_connected_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_connector, "MAX_KEPT", 3)
    network = Network()
    network.down = {"d1"}
    async with connecting(network) as connector:
        connector.name("a", (peer("d0"), peer("d1")))
        await until(lambda: len(network.problems()) == 2, "both were tried")
        connector.name("a", ())
        await network.told(d0="")
        tries = len(network.order)
        await asyncio.sleep(0.05)
        assert len(network.order) == tries, "nobody asks for the other one any more"
        connector.name("a", (peer("d0"),))
        for number in range(10):
            connector.name("b", (peer(f"x{number}"),))
            await until(lambda: f"x{number}" in network.problems(), "it is reached")  # noqa: B023
        assert set(network.problems()) == {"d0", *(f"x{number}" for number in range(6, 10))}


async def test_a_try_that_never_ends_is_a_failure_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_connector, "TRY_S", 0.05)
    network = Network()
    network.hanging.clear()
    async with connecting(network) as connector:
        connector.name("s", (peer("d0"),))
        await network.told(d0="10.0.0.1:9000: not connected within 0.05 s")
        network.hanging.set()
        await network.told(d0="")
