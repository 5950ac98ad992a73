"""Our routing against a cache-aware router's with equal memory, in rounds.

    python -m benchmarks.tier_rounds
    python -m benchmarks.tier_rounds --rounds 2 --dry      # a quick look

The loads, meshes and tiers of `benchmarks.tier_load`. Both routers bring almost the same goodput,
and one load of 50 requests moves it by a tenth, so one run says nothing. Here each round has loads
of its own, which both routers get in turning order, each in a mesh of its own. What is judged is
the mean over the rounds with its 95 % interval. Gateways know the limit of a first token and refuse
a request that no worker took by then. Pools alone are also compared with a later deadline: then an
overloaded mesh computes first tokens that come too late to count. Engines are modelled: a round
then takes a minute, and two pairs of meshes share a machine without taking the cores from one
another.
Tests: tests/unit/benchmarks/test_tier_rounds.py.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.live_load import DeviceShape, profile_of, write_profile
from benchmarks.live_mesh import say
from benchmarks.live_rounds import order, round_seed
from benchmarks.result import RESULTS, Row, Target, document, interval, markdown, save, spread
from benchmarks.tier_load import (
    ALONE,
    LIMIT,
    LOADS,
    NUM_DECODE,
    NUM_PREFILL,
    POOL_TOKENS,
    SHAPE,
    TIERED,
    TIERS_OF_POOL,
    UNIT_TOKENS,
    Form,
    Load,
    row_of,
)
from tests.e2e.api_client import ApiClient
from tests.mesh_processes import BLOCK_SIZE, MODEL_FOLDER, Flags, Mesh
from tests.redis_server import redis_process

OURS, THEIRS = "kvmesh", "cache_aware"
UNIT_S = 0.25
"""Seconds of a prompt of `UNIT_TOKENS` in `PART`."""

DECODE_STEP_S = 0.01 * UNIT_S
LONG = 12.0
"""Units after which a request that no worker took is refused if the limit is not told."""

PART = 4
"""Prompts and pools have so many times fewer tokens than those of `tier_load`, and a token takes as
much more time and memory. The services' own work grows with the tokens, and is to stay far below a
unit."""

TOKEN_BYTES = 2 * SHAPE.kv_values * PART
ROUNDS = 14


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison of the routers: the memory of the workers, and when gateways refuse.

    Attributes:
        host: host memory of each worker, in pools.
        deadline: units after which the gateway refuses a request that no worker took.
        least: goodput over the router's that the lower end of the interval must reach: what so many
            rounds can decide. Pools alone are overloaded, and the ratio differs by a seventh from
            round to round, which leaves 0.08 on either side of the mean. With tiers nearly all
            requests are in time.
    """

    name: str
    host: int
    deadline: float
    least: float


UNTOLD = f"{ALONE}, limit not told"
CASES = {
    case.name: case
    for case in (
        Case(ALONE, 0, LIMIT, 0.9),
        Case(UNTOLD, 0, LONG, 0.9),
        Case(TIERED, TIERS_OF_POOL, LIMIT, 0.95),
    )
}

_SPREAD = ("hit rate", "TTFT p50", "TTFT p99", "good", "goodput/s")


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean of ratios with the 95 % interval of it, all geometric.

    The arithmetic mean of ratios of two equal systems is above 1, whichever is the dividend.
    """

    low: float
    middle: float
    high: float


def mean_ratio(ratios: Sequence[float]) -> Mean:
    """Of ratios above 0; with one ratio all three are it."""
    logs = [math.log(ratio) for ratio in ratios]
    middle, half = math.fsum(logs) / len(logs), interval(logs)
    return Mean(*(math.exp(each) for each in (middle - half, middle, middle + half)))


def flags_of(case: Case, router: str, profile: Path, folder: Path) -> dict[str, Flags]:
    """The flags of a mesh's processes with modelled engines."""
    flags = Form(case.name, router, case.host).flags(MODEL_FOLDER, folder)
    modelled: dict[str, object] = {
        "engine.num-blocks": POOL_TOKENS // PART // BLOCK_SIZE,
        "engine.fake-profile": profile,
        "engine.fake-device": "device",
        "engine.fake-token-bytes": TOKEN_BYTES,
    }
    flags["prefill"] = flags["decode"] = {**flags["prefill"], **modelled}
    flags["gateway"] = {"limits.ttft-deadline-ms": round(1e3 * case.deadline * UNIT_S)}
    return flags


def modelled_device() -> DeviceShape:
    """As fast as `UNIT_S` says; a prompt's time grows with its tokens."""
    prompt_s = (0.0, UNIT_S * PART / UNIT_TOKENS, 0.0)
    return DeviceShape(prompt_s, (DECODE_STEP_S, 0.0), POOL_TOKENS // PART)


@asynccontextmanager
async def modelled_mesh(case: Case, router: str) -> AsyncIterator[Mesh]:
    """A mesh that serves; at the end all must stop with exit code 0 and without errors."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-rounds-")))
        profile = profile_of({"device": modelled_device()}, TOKEN_BYTES, 1e9)
        write_profile(folder / "profile.json", profile)
        mesh = Mesh(folder, flags=flags_of(case, router, folder / "profile.json", folder))
        mesh.redis = stack.enter_context(redis_process(folder))
        stack.callback(mesh.reap)
        await mesh.start(NUM_PREFILL, NUM_DECODE)
        yield mesh
        codes = await mesh.stop()
        assert set(codes.values()) <= {0}, codes
        assert mesh.failures() == [], mesh.failures()


async def run(case: Case, rounds: int, seed: int) -> list[Row]:
    """A row for each round, router and load."""
    began = time.perf_counter()
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        meshes: dict[str, tuple[Mesh, ApiClient]] = {}
        for router in (OURS, THEIRS):
            mesh = await stack.enter_async_context(modelled_mesh(case, router))
            meshes[router] = mesh, await stack.enter_async_context(ApiClient(mesh.url))
        for number in range(rounds):
            for router in order(list(meshes), number):
                mesh, client = meshes[router]
                for name in LOADS[:2]:
                    load = Load(client, f"{round_seed(seed, number)} {name}", UNIT_S, PART)
                    await getattr(load, name)(1.0)
                    await mesh.idle()
                    found = row_of(case.name, name, load.asked, load.seconds, UNIT_S)
                    about = {"router": router, "round": number + 1, "seconds": load.seconds}
                    rows.append({**about, **found})
            spent = time.perf_counter() - began
            told = (f"{name} {ratios(rows, name, case.name)[-1]:.3f}" for name in LOADS[:2])
            say(f"[{number + 1}/{rounds}] {spent:4.0f} s  {case.name}: {', '.join(told)}")
    return rows


def ratios(rows: Sequence[Row], load: str, form: str) -> list[float]:
    """Our goodput over the router's in each round.

    A system without any good request in a load counts as if it had half of one.
    """
    goodput = {
        (row["router"], row["round"]): max(float(row["goodput/s"]), 0.5 / row["seconds"])
        for row in rows
        if (row["load"], row["form"]) == (load, form)
    }
    numbers = sorted({number for _, number in goodput})
    return [goodput[OURS, number] / goodput[THEIRS, number] for number in numbers]


def summaries(rows: Sequence[Row]) -> list[Row]:
    """For each load and memory a row of either router, and one with the ratios of its rounds."""
    found: list[Row] = []
    for load, form in dict.fromkeys((row["load"], row["form"]) for row in rows):
        for router in (OURS, THEIRS):
            own = [
                row
                for row in rows
                if (row["load"], row["form"], row["router"]) == (load, form, router)
            ]
            counts = {name: sum(row[name] for row in own) for name in ("requests", "failed")}
            numbers = {name: spread([row[name] for row in own]) for name in _SPREAD}
            found.append({"load": load, "form": form, "router": router, **counts, **numbers})
        found.append({"load": load, "form": form, **_compared(ratios(rows, load, form))})
    return found


def _compared(by_round: Sequence[float]) -> Row:
    mean = mean_ratio(by_round)
    return {
        "router": f"{OURS} over {THEIRS}",
        "goodput ratio": spread(by_round),
        "mean": round(mean.middle, 3),
        "95 %": f"{mean.low:.3f} to {mean.high:.3f}",
        "by round": " ".join(f"{ratio:.2f}" for ratio in by_round),
    }


def targets(rows: Sequence[Row]) -> list[Target]:
    """The lower end of each interval."""
    found: list[Target] = []
    for load in LOADS[:2]:
        for case in CASES.values():
            by_round = ratios(rows, load, case.name)
            told = f"{load}: goodput over {THEIRS}, {case.name}"
            low = mean_ratio(by_round).low if len(by_round) > 1 else None
            found.append(Target(f"{told}, lower end of the mean's 95 % interval", low, case.least))
    return found


def notes(seconds: float) -> list[str]:
    """Of the table."""
    return f"""\
loads, pools and tiers as in tier_load, with 1/{PART} of their tokens; {NUM_PREFILL} prefill and
 {NUM_DECODE} decode workers with modelled engines, pools of {POOL_TOKENS // PART:,} tokens of
 {TOKEN_BYTES:,} bytes; KV is kept and sent for real; times in milliseconds
- unit: {UNIT_TOKENS // PART:,} prompt tokens take {1e3 * UNIT_S:g} ms; good: a first token within
 {LIMIT:g} units, and a request that no worker took by then is refused; where the limit is not told,
 after {LONG:g} units
- {TIERED}: {TIERS_OF_POOL} pools of it in each worker
- rounds: each has loads of its own, which both routers get one after the other, in turning order;
 each router has a mesh of its own, whose memory is full of earlier rounds
- min / median / max over the rounds; mean: geometric, of the ratios of each round, with the 95 %
 interval by Student's t of their logarithms
- pools alone with and without the limit run at the same time: engines sleep most of their steps
- took {seconds:.0f} s""".replace("\n ", " ").split("\n- ")


async def measure(rounds: int, seed: int) -> list[Row]:
    """Two cases at the same time: more would take the cores from one another."""
    rows: list[Row] = []
    for names in ((ALONE, UNTOLD), (TIERED,)):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(CASES[name], rounds, seed)) for name in names]
        rows += [row for task in tasks for row in task.result()]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes bench/results/tier_rounds.*."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    options = parser.parse_args(argv)
    began = time.perf_counter()
    rows = asyncio.run(measure(options.rounds, options.seed))
    about = notes(time.perf_counter() - began)
    result: dict[str, Any] = document(summaries(rows), targets(rows), options.seed, about)
    if not options.dry:
        save(result, RESULTS / "tier_rounds.json")
    sys.stdout.write(markdown(result))


if __name__ == "__main__":
    main()
