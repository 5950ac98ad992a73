"""PrfaaS live: a remote prefill cluster behind a kernel-limited link that falls to a third."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.live_link import FarLink, far_link, missing
from benchmarks.live_load import (
    Arrival,
    DeviceShape,
    Limits,
    Phase,
    arrivals,
    profile_of,
    simulated,
    traced,
    write_profile,
)
from benchmarks.live_mesh import FAR, Fleet, LiveMesh, live_mesh, say
from benchmarks.live_rounds import ROUNDS, gain, order, round_seed, summaries
from benchmarks.result import Row, Target
from kvmesh.policy.prfaas import Hardware, optimum, search, threshold_grid
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.trace import uncached_lengths
from tests.waiting import until

TOKEN_BYTES = 8192
LINK_BYTES_S = 24e6
FALLEN = 1 / 3
NUM_NEAR, NUM_FAR, NUM_DECODE = 2, 1, 2
DEVICES = {
    "fast": DeviceShape((0.02, 1.5e-4, 1.5e-8), (0.02, 2e-4)),
    "slow": DeviceShape((0.03, 4.5e-4, 4.5e-8), (0.02, 2e-4)),
}
LIMITS = Limits(ttft_s=3.0, tpot_s=0.1)
LOAD_S = 24.0
RATE = 5.0
"""Requests per second: home alone cannot serve them, both clusters with the whole link can, and at
home there is room when the link falls. At more it is full as well, and no threshold serves more
than another.
"""

LOW = (0.3, 0.8)
"""Shares of the load between which the link is low: at a third of its rate the KV of one long
prompt is on its way for two to four cycles of the threshold, so that few cycles say little.
"""

SAMPLE_S = 1000.0
"""Of the load that the threshold comes from: the optimum of the few prompts of one load is as much
as half above that of their distribution.
"""

NEAR = 0.1
"""The threshold is back when it is within this share of where it was."""

EXTREMES = ("all_local", "all_remote")
SYSTEMS = ("cache_load", "prfaas")
"""`cache_load` is the threshold that stays where it was; `prfaas` moves it. They are close, so they
have as many rounds as it takes; the extremes have the first one."""


def _load(scale: float, rate: float) -> list[Phase]:
    return [Phase(LOAD_S * scale, rate, 500, 1.0, 4000, 12)]


def best_threshold(profile: Path, rate: float, seed: int) -> int:
    """What the throughput model says for the lengths of such loads and this fleet."""
    long_load = _load(SAMPLE_S / LOAD_S, rate)
    lengths = uncached_lengths(traced(arrivals(long_load, seed)))
    hardware = Hardware(NUM_FAR, NUM_NEAR + NUM_DECODE, LINK_BYTES_S)
    grid = threshold_grid(lengths)
    points = search(load_profile(str(profile)).serving, lengths, hardware, grid, [NUM_NEAR])
    return int(optimum(points).threshold_tokens)


@dataclass(frozen=True, slots=True)
class Seen:
    """The threshold at one moment, and whether the link was low."""

    tokens: float
    is_low: bool


def rise(seen: Sequence[Seen]) -> float:
    """How far the threshold rose while the link was low, from where it was when the link fell.

    What waits at home may have brought it below its base before.
    """
    low = [each.tokens for each in seen if each.is_low]
    return max(low) / low[0] if low and low[0] else 1.0


async def _weather(link: FarLink, mesh: LiveMesh, seconds: float, seen: list[Seen]) -> None:
    """Lets the link be low between the shares `LOW` of the load; notes thresholds."""
    loop = asyncio.get_running_loop()
    began, is_low = loop.time(), False
    try:
        while True:
            elapsed = loop.time() - began
            wants_low = LOW[0] * seconds <= elapsed < LOW[1] * seconds
            if wants_low is not is_low:
                is_low = wants_low
                link.set_rate(LINK_BYTES_S * (FALLEN if is_low else 1.0))
            seen.append(Seen(await mesh.threshold(), is_low))
            await asyncio.sleep(0.5)
    finally:
        link.set_rate(LINK_BYTES_S)


async def run(folder: Path, scale: float, seed: int, rate: float = RATE) -> list[Row]:
    """All systems under the same loads and the same weather."""
    why = missing()
    if why:
        say(f"  left out: {why}")
        return []
    profile = write_profile(folder / "prfaas.json", profile_of(DEVICES, TOKEN_BYTES, LINK_BYTES_S))
    phases = _load(scale, rate)
    threshold = best_threshold(profile, rate, seed)
    say(f"  threshold by the model: {threshold} tokens")
    seconds = phases[0].seconds
    fleet = Fleet(
        {"remote": NUM_FAR, "prefill": NUM_NEAR, "decode": NUM_DECODE},
        {"remote": "fast", "prefill": "slow", "decode": "slow"},
        TOKEN_BYTES,
    )
    common: dict[str, object] = {
        "planning.remote-cluster": FAR,
        "planning.egress-mb-s": LINK_BYTES_S / 1e6,
        "planning.threshold-tokens": threshold,
        "planning.roles": "off",
        "routing.aggregate-tokens": 0,
    }
    rows: list[Row] = []
    with far_link(LINK_BYTES_S) as link:
        first = {**common, "routing.policy": EXTREMES[0]}
        async with live_mesh(fleet, profile, LIMITS, first, link=link) as mesh:
            for number in range(ROUNDS):
                load = arrivals(phases, round_seed(seed, number))
                for system in (*(EXTREMES if number == 0 else ()), *order(SYSTEMS, number)):
                    if rows:
                        await mesh.use_scheduler({"routing.policy": system})
                    row, seen = await _under_weather(mesh, link, system, load, seed + len(rows))
                    await until(partial(_is_back, mesh, system, threshold), "the threshold is back")
                    highest = max(each.tokens for each in seen)
                    if highest:
                        row["threshold"] = f"{threshold}, up to {highest:.0f}"
                        row["lift"] = round(rise(seen), 2)
                    row |= {"round": number + 1, **_twin(system, load, profile, seconds)}
                    rows.append({"part": "PrfaaS", **row})
                    say(f"    {rows[-1]}")
    return rows + summaries([row for row in rows if row["system"] in SYSTEMS])


async def _under_weather(
    mesh: LiveMesh, link: FarLink, system: str, load: Sequence[Arrival], seed: int
) -> tuple[Row, list[Seen]]:
    """One load; what was seen of it, and of the threshold meanwhile."""
    seen: list[Seen] = []
    weather = asyncio.create_task(_weather(link, mesh, load[-1].at_s, seen))
    try:
        row, _ = await mesh.load(system, load, seed)
    finally:
        weather.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await weather
    return row, seen


async def _is_back(mesh: LiveMesh, system: str, threshold: int) -> bool:
    return system != "prfaas" or abs(await mesh.threshold() / threshold - 1) < NEAR


def _twin(system: str, load: Sequence[Arrival], profile: Path, seconds: float) -> Row:
    home = f"home:slow:prefill:{NUM_NEAR},home:slow:decode:{NUM_DECODE}"
    fleet = f"remote:fast:prefill:{NUM_FAR},{home}"
    failures = f"{LOW[0] * seconds}:link:{FALLEN},{LOW[1] * seconds}:link:1"
    return simulated(system, load, profile, fleet, LIMITS, failures)


def judge(rows: list[Row]) -> list[Target]:
    """What was to hold."""
    if not rows:
        return []
    first = [row for row in rows if row["round"] == 1]
    lifts = [row["lift"] for row in rows if row["system"] == "prfaas" and "lift" in row]
    over_extremes = min(gain(first, "prfaas", extreme) for extreme in EXTREMES)
    return [
        Target("PrfaaS: threshold over all-local and all-remote", over_extremes, 1.0),
        Target("PrfaaS: moving threshold over fixed", gain(rows, "prfaas", "cache_load"), 1.0),
        Target(
            "PrfaaS: rise of the threshold while the link is low",
            statistics.median(lifts) if lifts else None,
            1.3,
        ),
    ]
