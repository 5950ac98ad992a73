from __future__ import annotations

from typing import Any

from kvmesh.core.peers import Peer, PeerCheck, PeerReport
from kvmesh.core.types import HostRoute, Role, RoutePlan, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.rpc.convert_peers import peer_report_to_proto, peers_from_proto
from kvmesh.rpc.convert_worker import worker_info_to_proto, worker_load_to_proto
from kvmesh.rpc.outbox import Outbox
from kvmesh.v1.scheduler_service_pb2 import RegisterWorkerRequest, RegisterWorkerResponse
from services.scheduler.config import FleetConfig
from services.scheduler.empty_spares import EmptySpares
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet
from services.scheduler.peers import PATIENCE_S, REPEAT_S, Peers
from services.scheduler.registrations import Registrations, WorkerStream
from tests.unit.policy.fleet_examples import query, worker_info
from tests.unit.scheduler.parts import Parts

HERE = HostRoute("host", "/run/kv.sock")
SHORT = {"p": Role.PREFILL, "d": Role.DECODE, "h": Role.HYBRID, "s": Role.SPARE}


class Wire(Outbox[RegisterWorkerResponse]):
    """Notes the peers that a worker is told."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[tuple[Peer, ...]] = []

    def put(self, message: RegisterWorkerResponse) -> None:
        if message.WhichOneof("order") == "peers":
            self.named.append(peers_from_proto(message.peers))


class Workers(Parts):
    """Workers that connect to each other when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.checks: dict[str, dict[str, PeerCheck]] = {}
        self.lives: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        """A scheduler begins, which knows nobody."""
        self.fleet = Fleet(1e9)
        self.use(self.settings)
        self.feed = FleetFeed(self.fleet)
        self.registrations = Registrations(
            self.fleet, self.feed, FleetConfig(), self.clock, EmptySpares()
        )
        self.peers = self.registrations.peers = Peers(
            self.fleet, self.feed, self.registrations.order, self.decisions, self.clock
        )
        self.streams: dict[str, WorkerStream] = {}
        self.wires: dict[str, Wire] = {}

    def info(self, name: str, **changes: Any) -> WorkerInfo:
        incarnation = self.lives.setdefault(name, 1)
        return worker_info(name, SHORT[name[0]], incarnation=incarnation, **changes)

    def report(self, name: str) -> PeerReport:
        return PeerReport(HERE, tuple(self.checks.get(name, {}).values()))

    def come(self, *names: str, is_old: bool = False, **changes: Any) -> None:
        """Workers register; old ones know nothing of peers."""
        for name in names:
            if name not in self.streams or self.streams[name].is_over:
                self.wires[name] = Wire()
                self.streams[name] = WorkerStream(self.wires[name])
            message = RegisterWorkerRequest(info=worker_info_to_proto(self.info(name, **changes)))
            if not is_old:
                message.peers.CopyFrom(peer_report_to_proto(self.report(name)))
            self.registrations.hear(message, self.streams[name])
            assert self.streams[name].refusal is None
            self.say(name)

    def say(self, name: str, *, with_peers: bool = False, draining: bool = False) -> None:
        load = WorkerLoad(blocks_free=512, draining=draining)
        message = RegisterWorkerRequest(load=worker_load_to_proto(load))
        if with_peers:
            message.peers.CopyFrom(peer_report_to_proto(self.report(name)))
        self.registrations.hear(message, self.streams[name])

    def go(self, name: str) -> None:
        self.registrations.end(self.streams[name])

    def tried(self, sender: str, receiver: str, problem: str = "") -> None:
        """A worker has tried a peer, and says so."""
        check = PeerCheck(WorkerId(receiver), self.lives[receiver], problem)
        self.checks.setdefault(sender, {})[receiver] = check
        self.say(sender, with_peers=True)
        self.peers.look()

    def named(self, name: str) -> list[str]:
        return [each.worker_id for each in (self.wires[name].named or [()])[-1]]

    @property
    def held(self) -> dict[str, str]:
        return {str(name): reason for name, reason in self.fleet.held.items()}

    async def plan(self) -> tuple[set[str], set[str]]:
        plan = await self.router.route(query(2000), "")
        assert isinstance(plan, RoutePlan)
        sides = (plan.prefill, plan.decode)
        prefill, decode = ({str(each.worker_id) for each in side} for side in sides)
        return prefill, decode


async def test_a_decode_worker_serves_once_its_prefill_workers_reached_it() -> None:
    made = Workers()
    made.come("p0", "p1", "d0")
    assert made.held == {"d0": ""}
    for name in ("p0", "p1"):
        ((told,),) = made.wires[name].named
        assert told == Peer(WorkerId("d0"), 1, made.info("d0").data_endpoint, HERE), (
            "as reservations name it"
        )
    assert made.wires["d0"].named == []
    made.tried("p0", "d0")
    assert made.held == {"d0": ""}, "one of two has reached it"
    made.tried("p1", "d0")
    assert made.held == {}
    assert await made.plan() == ({"p0", "p1"}, {"d0"})
    made.come("d1")
    assert await made.plan() == ({"p0", "p1"}, {"d0"}), "the new one waits, and nobody else"
    assert made.named("p0") == ["d0", "d1"]


async def test_a_worker_that_nobody_reaches_is_held_with_the_reason_until_it_is_reached() -> None:
    made = Workers()
    made.come("p0", "p1", "d0", "d1")
    for sender in ("p0", "p1"):
        made.tried(sender, "d1", "10.0.0.1:9: connection refused")
        made.tried(sender, "d0")
    (reason,) = made.held.values()
    assert reason == ("p0 cannot send KV to it: 10.0.0.1:9: connection refused (and 1 more pairs)")
    assert await made.plan() == ({"p0", "p1"}, {"d0"})
    (shown,) = [each for each in made.fleet.workers() if each.connecting]
    assert shown.info.worker_id == "d1"
    assert shown.fault == reason
    assert made.peers.shown({})["pairs"]["failed"] == ["p0 > d1", "p1 > d1"]
    for sender in ("p0", "p1"):
        made.tried(sender, "d1")
    assert made.held == {}
    assert await made.plan() == ({"p0", "p1"}, {"d0", "d1"})
    kinds = [each["reason"] for each in made.decisions.as_json()["fleet"]]
    assert kinds.count("connected") == 1


async def test_a_worker_that_reaches_nobody_leaves_the_others_in_peace() -> None:
    made = Workers()
    made.come("p0", "d0", "d1")
    for receiver in ("d0", "d1"):
        made.tried("p0", receiver)
    made.come("p1")
    for receiver in ("d0", "d1"):
        made.tried("p1", receiver, "no route to host")
    assert set(made.held) == {"p1"}
    assert made.held["p1"].startswith("it cannot send KV to d0: no route to host")
    assert await made.plan() == ({"p0"}, {"d0", "d1"})


async def test_silence_about_a_peer_counts_as_failure_in_the_end() -> None:
    made = Workers()
    made.come("p0", "d0", "d1")
    made.tried("p0", "d0")
    assert made.held == {"d1": ""}
    made.clock.advance(PATIENCE_S)
    assert made.peers.look()
    assert "did not report within 10 s" in made.held["d1"]
    made.tried("p0", "d1")
    assert made.held == {}


async def test_a_silent_worker_is_told_its_peers_again() -> None:
    """Its report, or what it was told, may have been lost with a connection."""
    made = Workers()
    made.come("p0", "d0")
    told = len(made.wires["p0"].named)
    made.clock.advance(REPEAT_S / 2)
    assert made.peers.look()
    assert len(made.wires["p0"].named) == told
    for _ in range(2):
        made.clock.advance(REPEAT_S)
        assert made.peers.look()
        told += 1
        assert len(made.wires["p0"].named) == told
        assert made.named("p0") == ["d0"]
    made.tried("p0", "d0")
    made.clock.advance(REPEAT_S)
    assert not made.peers.look()
    assert len(made.wires["p0"].named) == told


async def test_nobody_waits_for_a_worker_that_leaves() -> None:
    made = Workers()
    made.come("p0", "p1", "d0", "d1")
    for receiver in ("d0", "d1"):
        made.tried("p0", receiver)
    made.tried("p1", "d0")
    assert made.held == {"d1": ""}
    made.say("p1", draining=True)
    made.peers.look()
    assert made.held == {}


async def test_the_next_life_of_a_worker_is_checked_again() -> None:
    made = Workers()
    made.come("p0", "d0")
    made.tried("p0", "d0")
    made.go("d0")
    made.lives["d0"] = 2
    made.come("d0")
    assert made.held == {"d0": ""}
    assert made.wires["p0"].named[-1][0].incarnation == 2
    made.tried("p0", "d0")
    assert made.held == {}


async def test_another_scheduler_opens_at_once_what_workers_say_is_connected() -> None:
    made = Workers()
    made.come("p0", "d0", "p1")
    made.tried("p0", "d0")
    made.tried("p1", "d0")
    for order in (("d0", "p0", "p1"), ("p0", "d0", "p1")):
        made.start()
        for name in order:
            made.come(name)
            assert made.held == {}, "nobody is held for a moment"
    assert made.named("p1") == ["d0"], "and all are told their peers again"


async def test_a_remembered_worker_serves_until_it_is_back_and_is_not_named_before() -> None:
    made = Workers()
    assert made.fleet.restore(made.info("d0"), made.clock.now())
    made.come("p0")
    assert made.held == {"p0": ""}
    assert made.wires["p0"].named == []
    made.come("d0")
    assert made.named("p0") == ["d0"]
    made.tried("p0", "d0")
    assert made.held == {}


async def test_workers_of_an_older_version_are_not_waited_for() -> None:
    made = Workers()
    made.come("p0", is_old=True)
    made.come("d0")
    made.peers.look()
    assert made.held == {}
    made.come("p1")
    assert made.held == {"p1": ""}
    made.come("d1", is_old=True)
    made.peers.look()
    assert made.named("p1") == ["d0", "d1"]


async def test_roles_change_without_a_pause_and_spares_are_connected_before() -> None:
    made = Workers()
    made.come("p0", "d0", "d1", "s0")
    assert made.named("p0") == ["d0", "d1", "s0"]
    assert made.named("s0") == ["d0", "d1"]
    for receiver in ("d0", "d1", "s0"):
        made.tried("p0", receiver)
    made.come("d1")
    stream = made.streams["d1"]
    flipped = worker_info("d1", Role.PREFILL)
    message = RegisterWorkerRequest(info=worker_info_to_proto(flipped))
    message.peers.CopyFrom(peer_report_to_proto(made.report("d1")))
    made.registrations.hear(message, stream)
    assert made.held == {}, "it serves on, and is connected meanwhile"
    assert made.named("d1") == ["d0", "s0"]
    called = worker_info("s0", Role.DECODE)
    message = RegisterWorkerRequest(info=worker_info_to_proto(called))
    message.peers.CopyFrom(peer_report_to_proto(made.report("s0")))
    made.registrations.hear(message, made.streams["s0"])
    assert made.held == {"s0": ""}, "the one that has just changed has not reached it yet"
    made.tried("d1", "s0")
    assert made.held == {}


async def test_groups_do_not_check_each_other_and_hybrids_check_nobody() -> None:
    made = Workers()
    made.come("p0", scenario="chat")
    made.come("d0", scenario="doc")
    made.come("h0", "h1", scenario="both")
    assert made.held == {}
    assert [made.wires[each].named for each in ("p0", "h0", "h1")] == [[], [], []]
