"""P/D-Serve live: idle-only prefill against local queues, a wrong ratio, and a killed worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from benchmarks.live_load import (
    DeviceShape,
    Limits,
    Phase,
    Seen,
    arrivals,
    profile_of,
    simulated,
    write_profile,
)
from benchmarks.live_mesh import Fleet, LiveMesh, live_mesh, say
from benchmarks.result import Row, Target

TOKEN_BYTES = 1024
DEVICES = {"device": DeviceShape((0.02, 4e-4, 4e-8), (0.02, 3e-4))}
NAMES = {"prefill": "device", "decode": "device"}
LIMITS = Limits(ttft_s=1.5, tpot_s=0.08)
APART: dict[str, object] = {"planning.roles": "off", "routing.aggregate-tokens": 0}

# --- forwarding ----------------------------------------------------------------------------------

FACTORS = (1, 2, 3)
NOMINAL = 3.0
"""Requests per second of 1x; three prefill workers compute about nine of the mean length."""

LOCAL_SLOTS, IDLE_ONLY_SLOTS = 256, 1
"""A worker that takes every offer has a queue; one that takes none while it computes has not."""


async def forwarding(folder: Path, scale: float, seed: int) -> list[Row]:
    """The same mixed lengths at rising load."""
    profile = write_profile(folder / "forwarding.json", profile_of(DEVICES, TOKEN_BYTES, 1e9))
    rows: list[Row] = []
    for system, slots in (("local_queues", LOCAL_SLOTS), ("forwarding", IDLE_ONLY_SLOTS)):
        fleet = Fleet({"prefill": 3, "decode": 2}, NAMES, TOKEN_BYTES, slots)
        async with live_mesh(fleet, profile, LIMITS, {**APART, "routing.policy": system}) as mesh:
            for factor in FACTORS:
                phase = Phase(7.0 * scale, NOMINAL * factor, 450, 1.1, 5000, 12)
                load = arrivals([phase], seed)
                row, _ = await mesh.load(f"{system} {factor}x", load, seed + factor)
                home = "home:device:prefill:3,home:device:decode:2"
                twin = simulated(system, load, profile, home, LIMITS)
                rows.append({"part": "P/D-Serve forwarding", **row, **twin})
    return rows


def judge_forwarding(rows: Sequence[Row]) -> list[Target]:
    """What was to hold."""
    good = {row["system"]: row["good"] for row in rows}
    most = max(FACTORS)
    gain = good[f"forwarding {most}x"] / max(good[f"local_queues {most}x"], 1e-3)
    return [Target(f"forwarding at {most}x over local queues, good requests", gain, 1.0)]


# --- ratio ---------------------------------------------------------------------------------------


async def ratio(folder: Path, scale: float, seed: int) -> list[Row]:
    """Two prefill and four decode workers under a load that needs it the other way round."""
    profile = write_profile(folder / "ratio.json", profile_of(DEVICES, TOKEN_BYTES, 1e9))
    fleet = Fleet({"prefill": 2, "decode": 4}, NAMES, TOKEN_BYTES, IDLE_ONLY_SLOTS)
    phases = [Phase(4.0, 2.5, 1000, 0.3, 3000, 12), Phase(22.0 * scale, 5.6, 1000, 0.3, 3000, 12)]
    load = arrivals(phases, seed)
    rows: list[Row] = []
    flags = {**APART, "routing.policy": "pdserve", "planning.monitor-s": 3.0}
    async with live_mesh(fleet, profile, LIMITS, flags) as mesh:
        for number, roles in enumerate(("off", "apply")):
            await mesh.use_scheduler({"planning.roles": roles})
            name = "ratio adjusted" if number else "ratio as it was"
            row, seen = await mesh.load(name, load, seed + number)
            later = [each for each in seen if each.at_s > 0.6 * load[-1].at_s]
            row["good at last"] = round(sum(e.is_good(LIMITS) for e in later) / len(later), 3)
            found = await mesh.roles()
            row["roles"] = f"2:4 to {found[0]}:{found[1]}"
            rows.append({"part": "P/D-Serve ratio", **row})
    return rows


def judge_ratio(rows: Sequence[Row]) -> list[Target]:
    """What was to hold."""
    good = {row["system"]: row["good at last"] for row in rows}
    gain = good["ratio adjusted"] / max(good["ratio as it was"], 1e-3)
    return [Target("a wrong ratio, adjusted over left alone, last two fifths", gain, 1.1)]


# --- recovery ------------------------------------------------------------------------------------

KILLED = "decode-0"


async def recovery(folder: Path, scale: float, seed: int) -> list[Row]:
    """A decode worker is killed in the middle of a load, and its substitute started at once."""
    profile = write_profile(folder / "recovery.json", profile_of(DEVICES, TOKEN_BYTES, 1e9))
    fleet = Fleet({"prefill": 2, "decode": 3}, NAMES, TOKEN_BYTES, IDLE_ONLY_SLOTS)
    seconds = 16.0 * scale
    load = arrivals([Phase(seconds, 5.0, 250, 0.5, 2000, 80)], seed)
    async with live_mesh(fleet, profile, LIMITS, {**APART, "routing.policy": "kvmesh"}) as mesh:
        killing = asyncio.create_task(_kill(mesh, seconds / 3))
        row, seen = await mesh.load("a decode worker killed", load, seed)
        back_s = await killing
        metrics = await mesh.gateway_metrics()
        row["moved"] = int(metrics.value("kvmesh_gateway_moves_total"))
        row["recovered s"] = round(recovered_s(seen, seconds / 3), 1)
        row["substitute s"] = round(back_s, 1)
    say(f"    {row}")
    return [{"part": "P/D-Serve recovery", **row}]


async def _kill(mesh: LiveMesh, after_s: float) -> float:
    """Kills a worker; how long its substitute needs until it is known."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(after_s)
    killed = loop.time()
    mesh[KILLED].kill()
    mesh[KILLED].start()
    await mesh[KILLED].ready()
    await mesh.all_known()
    return loop.time() - killed


def recovered_s(seen: Sequence[Seen], killed_s: float) -> float:
    """From the kill to the last arrival that was not served well; 0 if all were."""
    bad = [each.at_s for each in seen if each.at_s > killed_s and not each.is_good(LIMITS)]
    return max((at - killed_s for at in bad), default=0.0)


def judge_recovery(rows: Sequence[Row]) -> list[Target]:
    """What was to hold."""
    (row,) = rows
    return [
        Target("requests lost with a killed worker", row["errors"], 0, at_most=True),
        Target("seconds to full goodput after the kill", row["recovered s"], 5.0, at_most=True),
    ]
