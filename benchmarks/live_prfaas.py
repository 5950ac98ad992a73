"""PrfaaS live: a remote prefill cluster behind a kernel-limited link that falls to a third."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Coroutine, Sequence
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

FLAPS, FLAP_S = 5, 20.0
FLAP_RATE = 4.0
"""A load of its own for the threshold: the link is whole and low so many times in turn, for so many
seconds, and home has room for what no longer leaves.
"""

SETTLE_S = 4.0
"""After the link changed its rate: what was on its way then, and four cycles of the threshold."""

FLAPPING = "prfaas, link to and fro"

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
    """The threshold at one moment, and whether the link was low.

    Attributes:
        for_s: how long the link had been as it was.
    """

    tokens: float
    is_low: bool
    for_s: float


def lift(seen: Sequence[Seen]) -> float:
    """How much higher the threshold is while the link is low than while it is whole: geometric
    means of moments at which it had settled.

    The highest threshold says little: bursts fill a whole link as well, for a cycle or two.
    """
    settled = [each for each in seen if each.for_s >= SETTLE_S and each.tokens > 0]
    low, whole = (
        [each.tokens for each in settled if each.is_low is side] for side in (True, False)
    )
    if not low or not whole:
        return 1.0
    return statistics.geometric_mean(low) / statistics.geometric_mean(whole)


async def _weather(
    link: FarLink, mesh: LiveMesh, spans: Sequence[tuple[float, float]], seen: list[Seen]
) -> None:
    """Lets the link be low in some spans, in seconds of the load; notes thresholds."""
    loop = asyncio.get_running_loop()
    began = since = loop.time()
    is_low = False
    try:
        while True:
            elapsed = loop.time() - began
            wants_low = any(begin <= elapsed < end for begin, end in spans)
            if wants_low is not is_low:
                is_low, since = wants_low, loop.time()
                link.set_rate(LINK_BYTES_S * (FALLEN if is_low else 1.0))
            tokens = await mesh.threshold()
            seen.append(Seen(tokens, is_low, loop.time() - since))
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
                    spans = [(LOW[0] * load[-1].at_s, LOW[1] * load[-1].at_s)]
                    seen: list[Seen] = []
                    weather = _weather(link, mesh, spans, seen)
                    row = await _under(weather, mesh, system, load, seed + len(rows))
                    await until(partial(_is_back, mesh, system, threshold), "the threshold is back")
                    highest = max(each.tokens for each in seen)
                    if highest:
                        row["threshold"] = f"{threshold}, up to {highest:.0f}"
                    row |= {"round": number + 1, **_twin(system, load, profile, seconds)}
                    rows.append({"part": "PrfaaS", **row})
                    say(f"    {rows[-1]}")
            await mesh.use_scheduler({"routing.policy": "prfaas"})
            rows.append(await _flapping(mesh, link, scale, seed))
            say(f"    {rows[-1]}")
    return rows + summaries([row for row in rows if row["system"] in SYSTEMS])


async def _under(
    weather: Coroutine[None, None, None],
    mesh: LiveMesh,
    system: str,
    load: Sequence[Arrival],
    seed: int,
) -> Row:
    """One load, while the weather goes on."""
    task = asyncio.create_task(weather)
    try:
        row, _ = await mesh.load(system, load, seed)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return row


async def _flapping(mesh: LiveMesh, link: FarLink, scale: float, seed: int) -> Row:
    """What the threshold does while the link is whole and low in turn."""
    flap_s = FLAP_S * scale
    spans = [((2 * each + 1) * flap_s, (2 * each + 2) * flap_s) for each in range(FLAPS)]
    load = arrivals([Phase(spans[-1][1], FLAP_RATE, 500, 1.0, 4000, 12)], seed)
    seen: list[Seen] = []
    row = await _under(_weather(link, mesh, spans, seen), mesh, FLAPPING, load, seed)
    return {"part": "PrfaaS", **row, "round": 1, "lift": round(lift(seen), 2)}


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
    lifted = [row["lift"] for row in rows if row["system"] == FLAPPING]
    over_extremes = min(gain(first, "prfaas", extreme) for extreme in EXTREMES)
    return [
        Target("PrfaaS: threshold over all-local and all-remote", over_extremes, 1.0),
        Target("PrfaaS: moving threshold over fixed", gain(rows, "prfaas", "cache_load"), 1.0),
        Target(
            "PrfaaS: threshold while the link is low over that while it is whole",
            lifted[0] if lifted else None,
            1.1,
        ),
    ]
