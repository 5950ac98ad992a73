"""The LoRA adapters of a worker: those of its start, and those that schedulers wish while it runs.

An adapter that is no longer wished is not told to gateways, so no new requests come. It stays in
its place until another adapter needs the place and no sequence uses it: requests that have begun
end as usual, also those that move here from a worker that died.

Tests: tests/unit/runtime/test_worker_adapters.py, tests/e2e/test_adapters.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from kvmesh.core.adapters import AdapterReport, AdapterWish, AdapterWishes, adapter_name
from kvmesh.core.errors import CheckpointError, ConfigError
from kvmesh.core.named_values import named_values
from kvmesh.engine.adapters import read_adapter
from kvmesh.engine.core import EngineCore
from kvmesh.engine.protocol import AdapterPlaces
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

BetweenSteps: TypeAlias = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs something in the engine's thread while no step is computed."""


def started_adapters(lora: str, ids: Iterable[str]) -> dict[str, str]:
    """Folders of the adapters that an engine began with, by id.

    Args:
        lora: `engine.lora`, which the engine has read.
    """
    folders = named_values(lora, "engine.lora", "NAME=FOLDER")
    return {each: folders[adapter_name(each)] for each in ids}


class WorkerAdapters:
    """Loads and removes adapters between the steps of an engine.

    Args:
        places: of the engine; None if it has none.
        started: folders of the adapters that the engine holds from its start, by id.
        on_change: called with the ids that gateways may use now.

    Attributes:
        on_report: called when wishes have been carried out.
    """

    def __init__(
        self,
        core: EngineCore,
        places: AdapterPlaces | None,
        started: Mapping[str, str],
        between_steps: BetweenSteps,
        on_change: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._core = core
        self._places = places
        self._between_steps = between_steps
        self._on_change = on_change
        self.on_report: Callable[[AdapterReport], None] = lambda _report: None
        self._listed = {adapter_name(each): each for each in started}
        self._started = {
            name: AdapterWish(name, started[each], 0) for name, each in self._listed.items()
        }
        self._done = dict(self._started)
        self._held = set(started)
        self._wishes = AdapterWishes()
        self._report: AdapterReport | None = None
        self._wake = asyncio.Event()

    @property
    def listed(self) -> tuple[str, ...]:
        """Ids of the adapters that gateways may use."""
        return tuple(sorted(self._listed.values()))

    def wish(self, wishes: AdapterWishes) -> None:
        """Takes the wishes of a scheduler. Older ones than it has are ignored."""
        if wishes.version > self._wishes.version:
            self._wishes = wishes
            self._wake.set()
        elif self._report is not None:
            self.on_report(self._report)  # that scheduler has just started

    async def run(self) -> None:
        """Carries wishes out, the newest ones, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            wishes = self._wishes
            failures = await self._carry_out(wishes)
            self._report = AdapterReport(wishes.version, failures)
            self.on_report(self._report)

    async def _carry_out(self, wishes: AdapterWishes) -> dict[str, str]:
        """Loads new adapters and unlists removed ones. Returns errors of missing ones, by name."""
        before = self.listed
        wanted = {**self._started, **{each.name: each for each in wishes.wishes}}
        for name in self._listed.keys() - wanted.keys():
            del self._listed[name], self._done[name]
        failures: dict[str, str] = {}
        for name, wish in wanted.items():
            if self._done.get(name) == wish:
                continue
            try:
                self._listed[name] = await self._load(wish)
            except (CheckpointError, ConfigError) as error:
                log.warning("adapter_refused", adapter=name, folder=wish.folder, error=str(error))
                failures[name] = str(error)
            else:
                self._done[name] = wish
        if self.listed != before:
            log.info("adapters", adapters=self.listed)
            self._on_change(self.listed)
        return failures

    async def _load(self, wish: AdapterWish) -> str:
        """Makes an adapter usable, and returns its id.

        Raises:
            CheckpointError: its folder holds none, or none of this model.
            ConfigError: the engine has no place for it.
        """
        if self._places is None:
            raise ConfigError(
                "this worker has no places for adapters: start it with --engine.kind vllm and "
                "--engine.max-loras"
            )
        folder = Path(wish.folder)
        adapter = await asyncio.to_thread(read_adapter, wish.name, folder)
        if adapter.id not in self._held:
            await self._free_place(self._places)
            await self._between_steps(partial(self._places.add, adapter))
            if (await asyncio.to_thread(read_adapter, wish.name, folder)).id != adapter.id:
                await self._between_steps(partial(self._places.remove, adapter.id))
                raise CheckpointError(f"{folder} changed while it was loaded: load it again")
            self._held.add(adapter.id)
            self._accept()
        return adapter.id

    async def _free_place(self, places: AdapterPlaces) -> None:
        """Removes an unused adapter, if all slots are taken.

        Raises:
            ConfigError: all of them are needed.
        """
        if len(self._held) < places.num_places:
            return
        leaving = self._held - set(self._listed.values())
        unused = sorted(leaving - self._core.adapters_in_use)
        if not unused:
            running = " Requests still run with one that was removed: try again." if leaving else ""
            raise ConfigError(
                f"all {places.num_places} places for adapters are taken: remove one, or start "
                f"workers with a larger --engine.max-loras.{running}"
            )
        self._held.discard(unused[0])
        self._accept()  # before the next step, so that no sequence comes for it
        await self._between_steps(partial(places.remove, unused[0]))

    def _accept(self) -> None:
        self._core.spec = replace(self._core.spec, adapters=tuple(sorted(self._held)))
