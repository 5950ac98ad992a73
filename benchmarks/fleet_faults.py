"""Faults live: the place of a killed worker is filled in each of the ways that there are, and ill
workers are ejected from among eight.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet_engines import STEP_S, FleetEngine
from benchmarks.fleet_fates import fates, is_met
from benchmarks.fleet_groups import STATE, group_file
from benchmarks.fleet_load import WAIT_S, Clients, clients, p99_ms, say, serving
from benchmarks.result import Row, Target
from kvmesh.cli.scheduler_access import LiveFleet
from kvmesh.cli.stack_state import read_description
from kvmesh.core.health import Health
from kvmesh.core.types import Role
from tests.e2e.local_stack import (
    a_taken_port,
    fault_of,
    group,
    member,
    running_up,
    watched,
)
from tests.mesh_child import scrape
from tests.waiting import until

# --- substitutes ---------------------------------------------------------------------------------

LOST = "decode-0"
WAYS = ("spare", "empty", "return", "flip", "slack", "process")


@dataclass(frozen=True, slots=True)
class Way:
    """A stack in which one way costs least.

    Attributes:
        words: for `kvmesh up`.
        more: of its environment.
        groups: further ones, with their prefill and decode workers.
        keeps_port: somebody else has the port of the lost worker, so it cannot come back.
        clients: how many ask.
    """

    words: tuple[str, ...]
    more: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[tuple[str, int, int], ...] = ()
    keeps_port: bool = False
    clients: int = 4


SUBSTITUTES = {
    "spare": Way(("--prefill", "2", "--decode", "2", "--spare", "1")),
    "empty": Way(("--prefill", "2", "--decode", "2", "--empty-spare", "1")),
    "return": Way(("--prefill", "2", "--decode", "2")),
    # The prefill side has slack even while it takes up the streams of the lost worker.
    "flip": Way(
        ("--prefill", "4", "--decode", "1"), {"KVMESH_PLANNING__ROLES": "apply"}, clients=2
    ),
    "slack": Way(("--prefill", "1", "--decode", "1"), groups=(("other", 1, 3),)),
    "process": Way(("--prefill", "2", "--decode", "2"), keeps_port=True),
}
LONG_ANSWER = 60
"""Tokens. Prefill workers have little to do, so that one of them may help."""


async def substitutes(folder: Path, _scale: float, engine: FleetEngine) -> list[Row]:
    """One decode worker is killed under load, once for each way to fill its place."""
    rows = []
    for name, way in SUBSTITUTES.items():
        own = folder / name
        own.mkdir()
        more = {**way.more, **engine.prepare(own, STEP_S)}
        async with (
            running_up(own, *engine.words, *way.words, more=more) as told,
            watched(told) as view,
        ):
            if way.groups:
                await group(own / STATE, "apply", str(group_file(own, *way.groups)))
            row = await _filled(name, way, engine, told, view)
            rows.append({"part": "substitute", "case": name, **row})
            say(f"  {rows[-1]}")
    return rows


async def _filled(
    name: str, way: Way, engine: FleetEngine, told: Mapping[str, Any], view: LiveFleet
) -> Row:
    loop = asyncio.get_running_loop()
    whole = serving(view, Role.DECODE)
    async with (
        AsyncExitStack() as later,
        clients(f"http://{told['http']}", engine, {"": way.clients}, LONG_ANSWER) as load,
    ):
        await load.more(16)
        lost = member(dict(told), LOST)
        before = load.asked[:]
        os.kill(lost["pid"], signal.SIGKILL)
        began = loop.time()
        if way.keeps_port:
            await later.enter_async_context(a_taken_port(int(lost["address"].rpartition(":")[2])))
        await until(lambda: not whole <= serving(view, Role.DECODE), "its loss is seen", WAIT_S)
        seen_s = loop.time() - began
        await until(
            lambda: len(serving(view, Role.DECODE)) >= len(whole), "its place is filled", WAIT_S
        )
        full_s = loop.time() - began
        await load.more(16)
    after = [each for each in load.asked if began <= each.at + each.took_s]
    counts = await _ways(told)
    taken = {way: count for way, count in counts.items() if count}
    return {
        "answers": len(load.asked),
        "failed": load.failed(),
        "wrong": load.wrong(),
        "p99 ms before": p99_ms(before),
        "p99 ms": p99_ms(after),
        "full capacity s": round(full_s, 2),
        "substitutes": int(sum(counts.values()) - counts["return"]),
        "detail": ", ".join(taken) + f"; loss seen after {seen_s:.2f} s",
        "as meant": bool(counts[name]),
    }


async def _ways(told: Mapping[str, Any]) -> dict[str, float]:
    """How often places were to be filled in which way."""
    port = member(dict(told), "scheduler")["metrics_port"]
    found = await scrape(f"http://127.0.0.1:{port}/metrics")
    return {each: found.value("kvmesh_scheduler_substitutes_total", step=each) for each in WAYS}


def judge_substitutes(rows: Sequence[Row]) -> list[Target]:
    """What was to hold."""
    most = max(row["substitutes"] for row in rows)
    filled = sum(row["as meant"] for row in rows)
    return [
        Target("substitute: ways that were taken where they cost least", filled, len(WAYS)),
        Target("substitute: most workers that took one place", most, 1, at_most=True),
        Target("substitute: requests lost", sum(r["failed"] for r in rows), 0, at_most=True),
        Target("substitute: wrong answers", sum(r["wrong"] for r in rows), 0, at_most=True),
    ]


# --- ejection ------------------------------------------------------------------------------------

SLOTS, EJECT_CLIENTS, TOKENS = 4, 8, 20
EIGHT = ("--prefill", "4", "--decode", "4")
LIMITS = {
    "KVMESH_WORKER__DECODE_SLOTS": str(SLOTS),
    "KVMESH_ROUTING__AGGREGATE_TOKENS": "0",
}
EJECT_STEP_S = 0.05
FAULTS = (
    ("hang", "decode-0"),
    ("slow 10", "decode-1"),
    ("nan", "prefill-0"),
    ("killed", "decode-2"),
    ("cut off", "prefill-1"),
)
"""What happens, and to whom."""


@dataclass(slots=True)
class _Seen:
    """Observations of one fault. Times are seconds on the loop's clock.

    Attributes:
        before: number of answers before it.
        began, over: when the worker fell ill, and when its next life could begin.
        last_s, out_s: seconds until it was tried last, and until it was ejected.
        others: other workers that were ejected.
    """

    before: int
    began: float = 0.0
    over: float = 0.0
    last_s: float = 0.0
    out_s: float = 0.0
    others: set[str] = field(default_factory=set)


async def ejection(folder: Path, scale: float, engine: FleetEngine) -> list[Row]:
    """Eight workers, of which one after another falls ill."""
    rows = []
    more = {**LIMITS, **engine.prepare(folder, EJECT_STEP_S, *(name for _, name in FAULTS))}
    async with (
        running_up(folder, *engine.words, *EIGHT, more=more) as told,
        watched(told) as view,
    ):
        await until(lambda: len(view.workers) == 8, "eight are there", WAIT_S)
        for fault, name in FAULTS:
            url = f"http://{told['http']}"
            async with clients(url, engine, {"": EJECT_CLIENTS}, TOKENS) as load:
                seen = await _ejected(fault, name, folder, view, load, int(80 * scale))
            found = await _shown(fault, name, told["console"], load, seen)
            rows.append({"part": "ejection", "case": fault, "detail": name, **found})
            say(f"  {rows[-1]}")
    return rows


async def _ejected(
    fault: str, name: str, folder: Path, view: LiveFleet, load: Clients, count: int
) -> _Seen:
    loop = asyncio.get_running_loop()
    await load.more(count)
    seen = _Seen(len(load.asked))
    life = next(each.info.incarnation for each in view.workers if each.info.worker_id == name)

    def is_out(level: Health) -> bool:
        found = {str(each.info.worker_id): each for each in view.workers}
        seen.others |= {w for w, e in found.items() if e.health >= Health.DEGRADED and w != name}
        ill = found.get(name)
        return ill is None or ill.health >= level or ill.info.incarnation != life

    async with _ill(fault, name, folder):
        seen.began = loop.time()
        await until(lambda: is_out(Health.SUSPECT), f"{name} is tried last", WAIT_S)
        seen.last_s = loop.time() - seen.began
        await until(lambda: is_out(Health.DEGRADED), f"{name} is ejected", WAIT_S)
        seen.out_s = loop.time() - seen.began
        await load.more(count)
        seen.over = loop.time()
    await until(lambda: is_well(view), "all are well again", WAIT_S)
    return seen


async def _shown(fault: str, name: str, console: str, load: Clients, seen: _Seen) -> Row:
    """The row of a fault, when all requests are over."""
    began, out = seen.began, seen.began + seen.out_s
    before = load.asked[: seen.before]
    during = [
        e for e in load.asked[seen.before :] if began <= e.at + e.took_s and e.at <= seen.over
    ]
    tales = await fates(console, during)
    met = [is_met(tale, name, began, out) for tale in tales]
    ill = [each for each, is_ill in zip(during, met, strict=True) if is_ill]
    spared = [each for each, is_ill in zip(during, met, strict=True) if not is_ill]
    return {
        "answers": len(load.asked),
        "failed": load.failed(),
        "wrong": load.wrong(),
        "tried last s": round(seen.last_s, 2),
        "ejected s": round(seen.out_s, 2),
        "met it": len(ill),
        "their longest ms": round(1e3 * max((each.took_s for each in ill), default=0.0)),
        "ejected beside": len(seen.others),
        "p99 ms before": p99_ms(before),
        "p99 ms": p99_ms(spared),
        "ratio": round(p99_ms(spared) / p99_ms(before), 3),
    }


@asynccontextmanager
async def _ill(fault: str, name: str, folder: Path) -> AsyncIterator[None]:
    """Makes a worker ill; at the end it has another life."""
    pid = _pid(folder, name)
    if fault == "killed":
        os.kill(pid, signal.SIGKILL)
    elif fault == "cut off":
        os.kill(pid, signal.SIGSTOP)
    else:
        fault_of(folder, name).write_text(fault)
    yield
    fault_of(folder, name).unlink(missing_ok=True)
    # A next life that began before the fault was over has it too.
    last = _pid(folder, name)
    if last and (last == pid or fault not in ("killed", "cut off")):
        os.kill(last, signal.SIGKILL)
        pid = last
    await until(lambda: _pid(folder, name) != pid, f"{name} has ended", WAIT_S)


def _pid(folder: Path, name: str) -> int:
    """0 while it does not run, or another process has its place for good."""
    told = read_description(folder / STATE) or {"members": []}
    return next((int(each["pid"]) for each in told["members"] if each["name"] == name), 0)


def is_well(view: LiveFleet) -> bool:
    """Whether all eight are there, and none is ill."""
    return len(view.workers) == 8 and all(each.health is Health.OK for each in view.workers)


def judge_ejection(rows: Sequence[Row]) -> list[Target]:
    """What was to hold."""
    return [
        *(
            Target(
                f"ejection, {row['case']}: seconds until it is ejected",
                row["ejected s"],
                3.0,
                at_most=True,
            )
            for row in rows
        ),
        Target("ejection: requests lost", sum(r["failed"] for r in rows), 0, at_most=True),
        Target("ejection: wrong answers", sum(r["wrong"] for r in rows), 0, at_most=True),
        Target(
            "ejection: most requests that met one",
            max(r["met it"] for r in rows),
            SLOTS,
            at_most=True,
        ),
        Target(
            "ejection: healthy ones ejected",
            sum(r["ejected beside"] for r in rows),
            0,
            at_most=True,
        ),
        Target(
            "ejection: others' p99 over before, worst",
            max(r["ratio"] for r in rows),
            1.2,
            at_most=True,
        ),
    ]
