"""FlowKV live: a load that needs 1:3 workers and then 3:1, with role switches and without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.live_load import (
    DeviceShape,
    Limits,
    Phase,
    arrivals,
    profile_of,
    simulated,
    write_profile,
)
from benchmarks.live_mesh import Fleet, live_mesh, say
from benchmarks.result import Row, Target

TOKEN_BYTES = 1024
DECODE_SLOTS = 8
DEVICES = {
    "device": DeviceShape((0.02, 4e-4, 4e-8), (0.02, 3e-4), prefill_slots=1,
                          decode_slots=DECODE_SLOTS)
}  # fmt: skip
LIMITS = Limits(ttft_s=2.0, tpot_s=0.08)
PHASES = (
    Phase(12.0, 9.0, 100, 0.3, 1000, 100),
    Phase(12.0, 5.2, 1100, 0.3, 4000, 6),
)
"""Decode first, then prefill."""

SYSTEMS = ("cache_load", "flowkv", "kvmesh")
"""`cache_load` keeps two and two."""


async def run(folder: Path, scale: float, seed: int) -> list[Row]:
    """All systems under the same load, each from two and two."""
    profile = write_profile(folder / "flowkv.json", profile_of(DEVICES, TOKEN_BYTES, 1e9))
    fleet = Fleet(
        {"prefill": 2, "decode": 2},
        {"prefill": "device", "decode": "device"},
        TOKEN_BYTES,
        slots=1,
        flags={"worker.decode-slots": DECODE_SLOTS},
    )
    phases = [
        Phase(p.seconds * scale, p.rate, p.median, p.sigma, p.longest, p.output_tokens)
        for p in PHASES
    ]
    load = arrivals(phases, seed)
    home = "home:device:prefill:2,home:device:decode:2"
    rows: list[Row] = []
    first: dict[str, object] = {"routing.policy": SYSTEMS[0], "routing.aggregate-tokens": 0}
    async with live_mesh(fleet, profile, LIMITS, first) as mesh:
        for number, system in enumerate(SYSTEMS):
            if number:
                await mesh.use_scheduler({"routing.policy": system})
            row, _ = await mesh.load(system, load, seed + number)
            switches = [e for e in await mesh.fleet_decisions() if e["kind"] == "switch"]
            row["switches"] = len(switches)
            # Who helps is called back when the load is over.
            await mesh.roles_are(2)
            rows.append({"part": "FlowKV", **row, **simulated(system, load, profile, home, LIMITS)})
            say(f"    {rows[-1]}")
    return rows


def judge(rows: Sequence[Row]) -> list[Target]:
    """What was to hold."""
    good = {row["system"]: row["goodput/s"] for row in rows}
    return [
        Target(f"FlowKV: {system} over fixed roles", good[system] / good["cache_load"], 1.0)
        for system in ("flowkv", "kvmesh")
    ]
