from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvmesh.core.adapters import adapter_id
from kvmesh.core.clock import ManualClock
from kvmesh.core.types import WorkerInfo
from kvmesh.metadata.memory_store import MemoryFleetStore
from kvmesh.rpc.convert_worker import worker_info_to_proto
from kvmesh.rpc.outbox import Outbox
from kvmesh.v1 import scheduler_service_pb2 as pb
from services.scheduler.adapters import AdapterError, Adapters, UnknownAdapterError
from services.scheduler.config import FleetConfig
from services.scheduler.empty_spares import EmptySpares
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet
from services.scheduler.registrations import Registrations, WorkerStream
from tests.unit.policy.fleet_examples import worker_info

FULL = "no place"


class Worker:
    """A worker that has what it is told to have, or refuses all."""

    def __init__(self, info: WorkerInfo, *, refuses: bool = False) -> None:
        self._info = info
        self._refuses = refuses
        self._registrations: Registrations | None = None
        self.versions: list[int] = []

    def join(self, registrations: Registrations) -> None:
        """Registers, at a scheduler that has just started or with a new life."""
        self._registrations = registrations
        self._stream = WorkerStream(Outbox())
        self._stream.orders.put = self._ordered  # type: ignore[method-assign,assignment]
        self._tell_info()

    def _tell_info(self) -> None:
        assert self._registrations is not None
        info = worker_info_to_proto(self._info)
        self._registrations.hear(pb.RegisterWorkerRequest(info=info), self._stream)

    def _ordered(self, order: pb.RegisterWorkerResponse) -> None:
        if not order.HasField("adapters"):
            return
        wishes = order.adapters
        if self.versions and wishes.version <= self.versions[-1]:
            return
        self.versions.append(wishes.version)
        names = [each.name for each in wishes.wishes]
        failures = dict.fromkeys(names, FULL) if self._refuses else {}
        loop = asyncio.get_running_loop()
        ids = [adapter_id(each.name, str(each.revision)) for each in wishes.wishes]
        loop.call_soon(self._done, wishes.version, () if self._refuses else tuple(ids), failures)

    def _done(self, version: int, ids: tuple[str, ...], failures: dict[str, str]) -> None:
        assert self._registrations is not None
        if ids != self._info.adapters:
            self._info = replace(self._info, adapters=ids)
            self._tell_info()
        report = pb.AdapterReport(version=version, failures=failures)
        self._registrations.hear(pb.RegisterWorkerRequest(adapters=report), self._stream)


class Scheduler:
    def __init__(self, store: MemoryFleetStore, name: str = "one") -> None:
        clock = ManualClock()
        self.fleet = Fleet(1e9)
        self.registrations = Registrations(
            self.fleet, FleetFeed(self.fleet), FleetConfig(), clock, EmptySpares()
        )
        self.adapters = Adapters(self.fleet, self.registrations, store, owner=name)


@contextmanager
def scheduler(*workers: Worker) -> Iterator[Scheduler]:
    made = Scheduler(MemoryFleetStore(ManualClock()))
    for each in workers:
        each.join(made.registrations)
    yield made


def states(view: pb.AdapterView) -> dict[str, str]:
    return {each.worker_id: each.problem or each.adapter for each in view.holders}


async def test_all_workers_of_the_model_load_it_and_those_that_come_later() -> None:
    first, other = Worker(worker_info("p")), Worker(worker_info("o", model="other"))
    with scheduler(first, other) as made:
        with pytest.raises(UnknownAdapterError, match="not one model; models: m, other"):
            await made.adapters.load("", "sql", "/a")
        view = await made.adapters.load("m", "sql", "/a")
        (held,) = states(view).values()
        assert (view.folder, states(view)) == ("/a", {"p": held})
        assert made.fleet.lacking("other", held) == {"o"}
        Worker(worker_info("d")).join(made.registrations)
        await asyncio.sleep(0)
        (view,) = made.adapters.views()
        assert states(view) == {"p": held, "d": held}
        assert all(each.answered for each in view.holders)


async def test_loaded_again_it_is_another_revision() -> None:
    with scheduler(Worker(worker_info("p"))) as made:
        before = states(await made.adapters.load("", "sql", "/a"))
        after = states(await made.adapters.load("m", "sql", "/a"))
        assert before != after
        assert len(made.adapters.views()) == 1


async def test_what_no_worker_takes_is_forgotten_and_what_some_take_is_told() -> None:
    full, has = Worker(worker_info("full"), refuses=True), Worker(worker_info("has"))
    with scheduler(full) as made:
        with pytest.raises(AdapterError, match=f"^{FULL}$"):
            await made.adapters.load("", "sql", "/a")
        assert made.adapters.views() == []
        has.join(made.registrations)
        view = await made.adapters.load("", "sql", "/a")
        assert states(view)["full"] == FULL
        assert states(view)["has"].startswith("sql@")


async def test_a_failed_reload_leaves_the_adapter_as_it_was() -> None:
    worker = Worker(worker_info("p"))
    with scheduler(worker) as made:
        await made.adapters.load("", "sql", "/a")
        worker._refuses = True
        with pytest.raises(AdapterError, match=FULL):
            await made.adapters.load("", "sql", "/b")
        (view,) = made.adapters.views()
        assert view.folder == "/a"


async def test_removed_it_is_gone_from_all_workers() -> None:
    with scheduler(Worker(worker_info("p")), Worker(worker_info("d"))) as made:
        await made.adapters.load("", "sql", "/a")
        with pytest.raises(UnknownAdapterError, match="no adapter 'py'; loaded: sql"):
            await made.adapters.remove("", "py")
        await made.adapters.remove("", "sql")
        assert made.adapters.views() == []
        assert all(not info.adapters for info in made.fleet.confirmed())


async def test_adapters_of_the_workers_start_are_shown_and_not_removed() -> None:
    class Stubborn(Worker):
        def _done(self, version: int, ids: tuple[str, ...], failures: dict[str, str]) -> None:
            super()._done(version, ("sql@start", *ids), failures)

    with scheduler(Stubborn(worker_info("p", adapters=("sql@start",)))) as made:
        (view,) = made.adapters.views()
        assert (view.folder, states(view)) == ("", {"p": "sql@start"})
        with pytest.raises(AdapterError, match="p have sql from their start"):
            await made.adapters.remove("", "sql")


@pytest.mark.parametrize(
    ("name", "folder", "why"),
    [
        ("m", "/a", "the name of a model"),
        ("a,b", "/a", "no commas"),
        ("sql", "", "a folder's path"),
        ("sql", "x" * 5000, "a folder's path"),
    ],
)
async def test_what_makes_no_sense(name: str, folder: str, why: str) -> None:
    worker = Worker(worker_info("p"))
    with scheduler(worker) as made:
        with pytest.raises(AdapterError, match=why):
            await made.adapters.load("", name, folder)
        assert worker.versions == []


async def test_schedulers_share_what_is_loaded() -> None:
    store = MemoryFleetStore(ManualClock())
    one, two = Scheduler(store), Scheduler(store, "two")
    worker = Worker(worker_info("p"))
    worker.join(one.registrations)
    await one.adapters.load("", "sql", "/a")
    later = Worker(worker_info("d"))
    later.join(two.registrations)
    assert later.versions == [], "it has not looked yet"
    await two.adapters.look()
    assert later.versions == worker.versions
    # And a lost store does not make newer wishes older.
    three = Scheduler(MemoryFleetStore(ManualClock()))
    later.join(three.registrations)
    await asyncio.sleep(0)
    await three.adapters.load("", "py", "/b")
    assert len(later.versions) == 2


async def test_one_scheduler_changes_at_a_time() -> None:
    store = MemoryFleetStore(ManualClock())
    made = Scheduler(store)
    Worker(worker_info("p")).join(made.registrations)
    assert await store.acquire_lease("adapters", "another", 5.0)
    with pytest.raises(AdapterError, match="another scheduler changes adapters now"):
        await made.adapters.load("", "sql", "/a")


async def test_a_damaged_store_is_told_and_not_overwritten() -> None:
    store = MemoryFleetStore(ManualClock())
    await store.put_adapters(b"\xff\xff")
    made = Scheduler(store)
    Worker(worker_info("p")).join(made.registrations)
    await made.adapters.look()
    with pytest.raises(AdapterError, match="damaged"):
        await made.adapters.load("", "sql", "/a")
    assert await store.adapters() == b"\xff\xff"
    assert await store.acquire_lease("adapters", "another", 5.0), "given back after a failed change"
