"""LoRA adapters that are loaded and removed while the fleet serves.

The store holds the wishes for all models. Each worker is told those of its model when it registers
and after every change, so one that starts again or joins later has them too. Every scheduler tells
its workers; workers take the newest wishes that they hear.
Tests: tests/unit/scheduler/test_adapters.py, tests/e2e/test_adapters.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from kvmesh.core.adapters import (
    MAX_FOLDER_CHARS,
    AdapterReport,
    AdapterWish,
    AdapterWishes,
    adapter_name,
    name_problem,
)
from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import WorkerId, WorkerInfo
from kvmesh.metadata.store import FleetStore, StoreUnavailableError
from kvmesh.rpc.convert_adapters import adapter_wishes_to_proto
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1 import scheduler_service_pb2 as pb
from services.scheduler.fleet import Fleet
from services.scheduler.registrations import Registrations

log = event_logger(__name__)

MAX_ADAPTERS = 1024
LOOK_S = 1.0
"""Seconds between looks into the store for changes that another scheduler made."""

ANSWER_S = 60.0
"""Seconds in which workers have to answer; loading from a slow disk takes some."""

LEASE = "adapters"
LEASE_TTL_S = 5.0


class AdapterError(KvMeshError):
    """An adapter cannot be loaded or removed; the message says why."""


class UnknownAdapterError(AdapterError):
    """There is no such adapter or model."""


@dataclass(slots=True)
class _Book:
    """All wishes, by model and name."""

    version: int = 0
    wishes: dict[tuple[str, str], AdapterWish] = field(default_factory=dict)

    @classmethod
    def read(cls, stored: bytes) -> _Book:
        """Reads the store's bytes.

        Raises:
            AdapterError: they are no wishes.
        """
        try:
            message = pb.AdapterWishes.FromString(stored)
        except DecodeError as error:
            raise AdapterError(f"the stored wishes for adapters are damaged: {error}") from error
        wishes = {
            (each.model, each.name): AdapterWish(each.name, each.folder, each.revision)
            for each in message.wishes
        }
        return cls(message.version, wishes)

    def stored(self) -> bytes:
        """The book as bytes for the store."""
        message = pb.AdapterWishes(version=self.version)
        for (model, name), wish in sorted(self.wishes.items()):
            told = pb.AdapterWish(name=name, folder=wish.folder, revision=wish.revision)
            told.model = model
            message.wishes.append(told)
        return message.SerializeToString()

    def changed(self, model: str, name: str, wish: AdapterWish | None) -> _Book:
        """The next version, with this wish, or without any for this name."""
        wishes = {key: each for key, each in self.wishes.items() if key != (model, name)}
        if wish is not None:
            wishes[model, name] = wish
        return _Book(self.next_version, wishes)

    @property
    def next_version(self) -> int:
        """Version of the next change; larger than those of a book that was lost."""
        return max(self.version + 1, time.time_ns() // 1000)

    def of(self, model: str) -> AdapterWishes:
        """The wishes for the workers of a model."""
        found = (each for (of, _), each in sorted(self.wishes.items()) if of == model)
        return AdapterWishes(self.version, tuple(found))


class Adapters:
    """The adapters of one scheduler's fleet.

    Args:
        store: keeps the wishes, and the lease of the scheduler that changes them.
        owner: this scheduler's name in the lease.
    """

    def __init__(
        self, fleet: Fleet, registrations: Registrations, store: FleetStore, *, owner: str
    ) -> None:
        self._fleet = fleet
        self._registrations = registrations
        self._store = store
        self._owner = owner
        self._book = _Book()
        self._reports: dict[WorkerId, tuple[int, AdapterReport]] = {}
        self._changing = asyncio.Lock()
        self._heard = asyncio.Event()
        self._problem = ""
        registrations.on_registered = self._tell
        registrations.on_adapters = self._hear

    async def run(self) -> None:
        """Looks for changes of other schedulers, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Takes over a newer book from the store, and tells the workers."""
        problem = ""
        try:
            async with self._changing:
                self._take(_Book.read(await self._store.adapters()))
        except (AdapterError, StoreUnavailableError) as error:
            problem = str(error)
        if problem and not self._problem:  # logged once
            log.warning("adapters_not_read", error=problem)
        self._problem = problem
        present = {info.worker_id for info in self._fleet.confirmed()}
        self._reports = {name: each for name, each in self._reports.items() if name in present}

    # --- for operators --------------------------------------------------------------------------

    async def load(self, model: str, name: str, folder: str) -> pb.AdapterView:
        """Loads an adapter on all workers of a model, or loads it again.

        Args:
            model: empty for the only one of the fleet.

        Returns:
            What came of it on each worker; on one of them at least it is there.

        Raises:
            UnknownAdapterError: there is no such model.
            AdapterError: no worker took it, and nothing is changed.
            StoreUnavailableError: the wish cannot be stored.
        """
        model = self._model(model)
        if problem := name_problem(name):
            raise AdapterError(f"{name!r}: {problem}")
        if name in self._models:
            raise AdapterError(f"{name} is the name of a model: give the adapter another one")
        if not 0 < len(folder) <= MAX_FOLDER_CHARS:
            raise AdapterError(f"a folder's path has 1 to {MAX_FOLDER_CHARS} characters")
        async with self._owned() as book:
            if len(book.wishes) >= MAX_ADAPTERS and (model, name) not in book.wishes:
                raise AdapterError(f"{MAX_ADAPTERS} adapters are loaded: remove one")
            before = book.wishes.get((model, name))
            wish = AdapterWish(name, folder, book.next_version)
            await self._put(book.changed(model, name, wish))
        await self._answered(model)
        view = self._view(model, name)
        if view.holders and all(each.problem for each in view.holders):
            async with self._owned() as book:
                if book.wishes.get((model, name)) == wish:
                    await self._put(book.changed(model, name, before))
            told = {each.problem for each in view.holders}
            raise AdapterError("; ".join(sorted(told)))
        log.info("adapter_loaded", adapter=name, model=model, folder=folder)
        return view

    async def remove(self, model: str, name: str) -> None:
        """Takes an adapter away; requests that run with it end as usual.

        Args:
            model: empty for the only one that has such an adapter.

        Raises:
            UnknownAdapterError: there is none.
            AdapterError: workers have it from their start.
            StoreUnavailableError: the wish cannot be stored.
        """
        having = {each.model for each in self.views() if each.name == name}
        if model:
            having &= {model}
        if not having:
            known = ", ".join(sorted({each.name for each in self.views()})) or "none"
            raise UnknownAdapterError(f"there is no adapter {name!r}; loaded: {known}")
        if len(having) > 1:
            raise AdapterError(f"{name} is an adapter of {', '.join(sorted(having))}: name one")
        (model,) = having
        async with self._owned() as book:
            await self._put(book.changed(model, name, None))
        await self._answered(model)
        left = [each.worker_id for each in self._view(model, name).holders if each.adapter]
        if left:
            raise AdapterError(
                f"{', '.join(left)} have {name} from their start: start them without it "
                "(engine.lora)"
            )
        log.info("adapter_removed", adapter=name, model=model)

    def views(self) -> list[pb.AdapterView]:
        """All adapters, by model and name, for people."""
        keys = set(self._book.wishes)
        for model in self._models:
            infos = self._infos(model)
            keys |= {(model, adapter_name(each)) for info in infos for each in info.adapters}
        return [self._view(*key) for key in sorted(keys)]

    # --- workers --------------------------------------------------------------------------------

    def _tell(self, info: WorkerInfo) -> None:
        """Tells a worker the wishes for its model, if there were ever any."""
        if self._book.version:
            wishes = adapter_wishes_to_proto(self._book.of(info.model))
            order = pb.RegisterWorkerResponse(adapters=wishes)
            self._registrations.order(info.worker_id, order)

    def _hear(self, info: WorkerInfo, report: AdapterReport) -> None:
        self._reports[info.worker_id] = info.incarnation, report
        self._heard.set()

    async def _answered(self, model: str) -> None:
        """Waits until the workers of a model that are here have answered, or their time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while not all(self._has_answered(info) for info in self._infos(model)):
                    self._heard.clear()
                    with contextlib.suppress(TimeoutError):  # a worker may also leave
                        await asyncio.wait_for(self._heard.wait(), LOOK_S)

    def _has_answered(self, info: WorkerInfo) -> bool:
        report = self._report(info)
        return report is not None and report.version >= self._book.version

    def _report(self, info: WorkerInfo) -> AdapterReport | None:
        incarnation, report = self._reports.get(info.worker_id, (0, None))
        return report if incarnation == info.incarnation else None

    def _view(self, model: str, name: str) -> pb.AdapterView:
        wish = self._book.wishes.get((model, name))
        view = pb.AdapterView(name=name, model=model, folder=wish.folder if wish else "")
        for info in sorted(self._infos(model), key=lambda each: each.worker_id):
            report = self._report(info)
            view.holders.add(
                worker_id=info.worker_id,
                adapter=_of_name(info.adapters, name),
                problem=report.failures.get(name, "") if report and wish else "",
                answered=self._has_answered(info),
            )
        return view

    @property
    def _models(self) -> set[str]:
        return {info.model for info in self._fleet.confirmed()}

    def _infos(self, model: str) -> list[WorkerInfo]:
        return [info for info in self._fleet.confirmed() if info.model == model]

    def _model(self, named: str) -> str:
        models = self._models
        if named in models:
            return named
        known = ", ".join(sorted(models)) or "none"
        if named or len(models) != 1:
            what = f"no worker of the model {named!r}" if named else "not one model"
            raise UnknownAdapterError(f"there is {what}; models: {known}")
        return next(iter(models))

    # --- the store ------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _owned(self) -> AsyncIterator[_Book]:
        """Provides the newest book, which no other scheduler changes meanwhile.

        Raises:
            AdapterError: another scheduler is changing it.
        """
        async with self._changing:
            if not await self._store.acquire_lease(LEASE, self._owner, LEASE_TTL_S):
                raise AdapterError("another scheduler changes adapters now: try again")
            try:
                self._take(_Book.read(await self._store.adapters()))
                yield self._book
            finally:
                with contextlib.suppress(StoreUnavailableError):  # it ends by itself soon
                    await self._store.release_lease(LEASE, self._owner)

    async def _put(self, book: _Book) -> None:
        await self._store.put_adapters(book.stored())
        self._take(book)

    def _take(self, book: _Book) -> None:
        if book.version > self._book.version:
            self._book = book
            for info in self._fleet.confirmed():
                self._tell(info)


def _of_name(adapters: Iterable[str], name: str) -> str:
    return next((each for each in adapters if adapter_name(each) == name), "")
