from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.core.adapters import AdapterReport, AdapterWish, AdapterWishes, adapter_name
from kvmesh.core.types import Refusal
from kvmesh.engine.adapters import CONFIG, WEIGHTS, read_adapter
from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeDevice, FakePlaces, FakeRunner
from kvmesh.engine.sequence import Sequence
from kvmesh.runtime.worker_adapters import WorkerAdapters, started_adapters
from tests.worker_driver import make_spec

MAX_RANK = 16


def write(folder: Path, weights: bytes = b"weights", rank: int = 8) -> str:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (folder / WEIGHTS).write_bytes(weights)
    return str(folder)


class Bench:
    """Adapters of an engine that computes nothing, and what they told."""

    def __init__(self, num_places: int, lora: str = "") -> None:
        started = [
            read_adapter(name, Path(folder))
            for name, _, folder in (each.partition("=") for each in lora.split(",") if each)
        ]
        places = FakePlaces(num_places, MAX_RANK, started) if num_places else None
        runner = FakeRunner(device=FakeDevice(places=places))
        self.places = places
        self.core = EngineCore(runner.spec, 64)
        self.told: list[list[str]] = []
        self.reports: list[AdapterReport] = []
        self.reported = asyncio.Event()
        self.adapters = WorkerAdapters(
            self.core,
            runner.adapter_places,
            started_adapters(lora, runner.spec.adapters),
            self._now,
            self._tell,
        )
        self.adapters.on_report = self._report

    async def _now(self, work: Callable[[], None]) -> None:
        work()

    def _tell(self, ids: tuple[str, ...]) -> None:
        self.told.append([adapter_name(each) for each in ids])

    def _report(self, report: AdapterReport) -> None:
        self.reports.append(report)
        self.reported.set()

    async def wish(self, version: int, *wishes: AdapterWish) -> dict[str, str]:
        """Wishes, and waits for what came of it."""
        self.reported.clear()
        self.adapters.wish(AdapterWishes(version, wishes))
        async with asyncio.timeout(10):
            await self.reported.wait()
        assert self.reports[-1].version == version
        return dict(self.reports[-1].failures)

    def admit(self, adapter: str) -> Sequence | Refusal:
        return self.core.admit_decode(replace(make_spec([1, 2, 3], 4), adapter=adapter))


@asynccontextmanager
async def running(num_places: int, lora: str = "") -> AsyncIterator[Bench]:
    bench = Bench(num_places, lora)
    task = asyncio.create_task(bench.adapters.run())
    try:
        yield bench
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_wished_adapters_are_loaded_and_told_and_again_unlisted(tmp_path: Path) -> None:
    sql, py = write(tmp_path / "sql"), write(tmp_path / "py", b"others")
    async with running(2) as bench:
        wishes = AdapterWish("sql", sql, 1), AdapterWish("py", py, 1)
        assert await bench.wish(5, *wishes) == {}
        assert bench.told == [["py", "sql"]]
        (_, held) = bench.adapters.listed
        assert isinstance(bench.admit(held), Sequence)
        assert isinstance(bench.admit("sql"), Refusal)
        assert await bench.wish(6, wishes[1]) == {}
        assert bench.told[1:] == [["py"]]
        # Requests that have begun elsewhere may still come.
        assert isinstance(bench.admit(held), Sequence)


async def test_older_wishes_are_ignored_and_a_new_scheduler_hears_the_last_report(
    tmp_path: Path,
) -> None:
    wish = AdapterWish("sql", write(tmp_path / "sql"), 1)
    async with running(1) as bench:
        await bench.wish(5, wish)
        bench.adapters.wish(AdapterWishes(4))
        bench.adapters.wish(AdapterWishes(5))
        assert bench.reports == [AdapterReport(5)] * 3
        assert bench.told == [["sql"]]


async def test_other_weights_under_the_same_name_are_another_adapter(tmp_path: Path) -> None:
    folder = write(tmp_path / "sql")
    async with running(2) as bench:
        await bench.wish(1, AdapterWish("sql", folder, 1))
        (before,) = bench.adapters.listed
        write(tmp_path / "sql", b"trained on")
        await bench.wish(2, AdapterWish("sql", folder, 1))
        assert bench.adapters.listed == (before,)  # nobody asked to read it again
        await bench.wish(3, AdapterWish("sql", folder, 3))
        (after,) = bench.adapters.listed
        assert (adapter_name(after), after == before) == ("sql", False)
        assert isinstance(bench.admit(before), Sequence)
        assert isinstance(bench.admit(after), Sequence)


async def test_a_place_is_freed_only_of_what_nobody_uses(tmp_path: Path) -> None:
    one, two = (
        AdapterWish(name, write(tmp_path / name, name.encode()), 1) for name in ("one", "two")
    )
    async with running(1) as bench:
        await bench.wish(1, one)
        (held,) = bench.adapters.listed
        failures = await bench.wish(2, one, two)
        assert failures.keys() == {"two"}
        assert "all 1 places for adapters are taken" in failures["two"]
        sequence = bench.admit(held)
        assert isinstance(sequence, Sequence)
        failures = await bench.wish(3, two)
        assert "Requests still run with one that was removed" in failures["two"]
        assert bench.told[-1] == []
        bench.core.release(sequence)
        assert await bench.wish(4, two) == {}
        assert bench.told[-1] == ["two"]
        assert isinstance(bench.admit(held), Refusal)
        assert bench.places is not None
        assert bench.places.ids == bench.adapters.listed


async def test_what_cannot_be_loaded_says_why_and_leaves_what_there_was(tmp_path: Path) -> None:
    good = AdapterWish("sql", write(tmp_path / "sql"), 1)
    long = AdapterWish("long", write(tmp_path / "long", rank=64), 1)
    async with running(3) as bench:
        failures = await bench.wish(1, good, long, AdapterWish("no", str(tmp_path / "no"), 1))
        assert failures.keys() == {"long", "no"}
        assert "takes up to 16" in failures["long"]
        assert "has no adapter_config.json" in failures["no"]
        assert bench.told == [["sql"]]
        (before,) = bench.adapters.listed
        (tmp_path / "sql" / WEIGHTS).unlink()
        assert (await bench.wish(2, replace(good, revision=2))).keys() == {"sql"}
        assert bench.adapters.listed == (before,)


async def test_an_engine_without_places_refuses(tmp_path: Path) -> None:
    async with running(0) as bench:
        failures = await bench.wish(1, AdapterWish("sql", write(tmp_path / "sql"), 1))
        assert "--engine.kind vllm and --engine.max-loras" in failures["sql"]
        assert bench.told == []


async def test_adapters_of_the_start_stay_and_come_back(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b", b"others")
    async with running(2, f"sql={first}") as bench:
        (before,) = bench.adapters.listed
        await bench.wish(1)
        assert bench.told == []
        await bench.wish(2, AdapterWish("sql", second, 2))
        assert bench.adapters.listed != (before,)
        await bench.wish(3)
        assert bench.adapters.listed == (before,)


async def test_a_folder_that_changes_while_it_is_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "sql")
    add = FakePlaces.add

    def changing(places: FakePlaces, adapter: object) -> None:
        add(places, adapter)  # type: ignore[arg-type]
        write(tmp_path / "sql", b"written meanwhile")

    monkeypatch.setattr(FakePlaces, "add", changing)
    async with running(1) as bench:
        failures = await bench.wish(1, AdapterWish("sql", folder, 1))
        assert "changed while it was loaded" in failures["sql"]
        assert bench.places is not None
        assert bench.places.ids == ()
