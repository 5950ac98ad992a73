"""TokenLake live: popular prefixes over caches of their own, and over one pool of them."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import random
import signal
from collections.abc import Sequence
from pathlib import Path

from benchmarks.live_load import (
    Arrival,
    DeviceShape,
    Limits,
    Phase,
    arrivals,
    profile_of,
    write_profile,
)
from benchmarks.live_mesh import Fleet, LiveMesh, live_mesh, say
from benchmarks.result import Row, Target
from kvmesh.core.summary_statistics import coefficient_of_variation

TOKEN_BYTES = 512
NUM_PREFILL = 3
NUM_PREFIXES, PREFIX_TOKENS, SKEW = 16, 2048, 1.2
"""The n-th prefix is drawn with weight n ** -SKEW; one worker has no room for all of them."""

NUM_TOKENS = 16_384
DEVICES = {"device": DeviceShape((0.02, 4e-4, 2e-8), (0.02, 3e-4), num_tokens=NUM_TOKENS)}
LIMITS = Limits(ttft_s=2.0, tpot_s=0.08)
RATE, SECONDS, TAIL_TOKENS, OUTPUT_TOKENS = 6.0, 15.0, 96, 6
SYSTEMS = ("cache_load", "cache_aware", "kvmesh")
"""The first two compute what their worker does not hold; the last fetches it, and copies."""


def popular(load: Sequence[Arrival], first: int, seed: int) -> list[Arrival]:
    """The same arrivals, with beginnings that some share.

    Args:
        first: number of the most popular beginning.
    """
    draw = random.Random(seed)
    weights = ((rank + 1) ** -SKEW for rank in range(NUM_PREFIXES))
    shares = list(itertools.accumulate(weights))
    return [
        dataclasses.replace(
            each,
            input_tokens=PREFIX_TOKENS + each.input_tokens,
            prefix=first + bisect.bisect(shares, draw.random() * shares[-1]),
            prefix_tokens=PREFIX_TOKENS,
        )
        for each in load
    ]


async def run(folder: Path, scale: float, seed: int) -> list[Row]:
    """All systems at equal memory, each with prefixes that nobody has seen."""
    profile = write_profile(folder / "tokenlake.json", profile_of(DEVICES, TOKEN_BYTES, 1e9))
    fleet = Fleet(
        {"prefill": NUM_PREFILL, "decode": 2},
        {"prefill": "device", "decode": "device"},
        TOKEN_BYTES,
        num_tokens=NUM_TOKENS,
    )
    plain = arrivals([Phase(SECONDS * scale, RATE, TAIL_TOKENS, 0.3, 400, OUTPUT_TOKENS)], seed)
    scheduler: dict[str, object] = {
        "routing.policy": SYSTEMS[0],
        "routing.aggregate-tokens": 0,
        "planning.roles": "off",
    }
    kvmanager: dict[str, object] = {"pool.budget-mb-s": 0.0, "pool.window-s": 2.0}
    rows: list[Row] = []
    async with live_mesh(fleet, profile, LIMITS, scheduler, kvmanager=kvmanager) as mesh:
        for number, system in enumerate(SYSTEMS):
            if system == "kvmesh":
                await _allow_copies(mesh)
            if number:
                await mesh.use_scheduler({"routing.policy": system})
            load = popular(plain, number * NUM_PREFIXES, seed)
            before, copied = await _reads(mesh), await _copied_tokens(mesh)
            row, _ = await mesh.load(system, load, seed + number)
            copied = await _copied_tokens(mesh) - copied
            tokens = sum(each.input_tokens for each in load)
            row |= _hits(before, await _reads(mesh), copied, tokens)
            rows.append({"part": "TokenLake", **row})
            say(f"    {rows[-1]}")
    return rows


async def _allow_copies(mesh: LiveMesh) -> None:
    child = mesh["kvmanager"]
    child.signal(signal.SIGTERM)
    assert await child.exit_code() == 0, "the kvmanager stops in order"
    child.flags["pool.budget-mb-s"] = 100.0
    await mesh.restart("kvmanager")
    await mesh.all_known()


async def _reads(mesh: LiveMesh) -> list[tuple[float, float]]:
    """Tokens found cached and tokens fetched so far, by prefill worker."""
    found: list[tuple[float, float]] = []
    for number in range(NUM_PREFILL):
        metrics = await mesh[f"prefill-{number}"].metrics()
        hits = metrics.value("vllm:prefix_cache_hits_total")
        found.append((hits, metrics.value("kvmesh_prefix_fetched_tokens_total")))
    return found


async def _copied_tokens(mesh: LiveMesh) -> float:
    """Tokens whose KV the kvmanager had copied so far, on any worker."""
    metrics = await mesh["kvmanager"].metrics()
    return metrics.value("kvmesh_kvmanager_pool_copied_bytes_total") / TOKEN_BYTES


def _hits(
    before: Sequence[tuple[float, float]],
    after: Sequence[tuple[float, float]],
    copied: float,
    tokens: int,
) -> Row:
    """Shares of all prompt tokens, and how unevenly the caches were read.

    Workers count copies among what they fetched, but nobody has used those yet: whoever does has a
    hit. They are taken off, those of decode workers too, so that reuse is never overstated.
    """
    hits = [b[0] - a[0] for a, b in zip(before, after, strict=True)]
    fetched = sum(b[1] - a[1] for a, b in zip(before, after, strict=True)) - copied
    return {
        "hits": round(sum(hits) / tokens, 3),
        "fetched": round(max(fetched, 0.0) / tokens, 3),
        "copied": round(copied / tokens, 3),
        "CV of hits": round(coefficient_of_variation(hits), 3),
    }


def judge(rows: Sequence[Row]) -> list[Target]:
    """What was to hold."""
    by_name = {row["system"]: row for row in rows}
    pool, others = by_name["kvmesh"], (by_name["cache_load"], by_name["cache_aware"])
    reused = pool["hits"] + pool["fetched"]
    best = max(each["hits"] for each in others)
    ttft = min(each["TTFT p90"] for each in others)
    return [
        Target("TokenLake: reused tokens over the best of caches per worker", reused / best, 1.0),
        Target("TokenLake: TTFT p90 over theirs", pool["TTFT p90"] / ttft, 1.0, at_most=True),
    ]
