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
from benchmarks.live_rounds import ROUNDS, gain, order, round_seed, summaries
from benchmarks.result import Row, Target

TOKEN_BYTES = 1024
DECODE_SLOTS = 8
DEVICES = {
    "device": DeviceShape((0.02, 4e-4, 4e-8), (0.02, 3e-4), prefill_slots=1,
                          decode_slots=DECODE_SLOTS)
}  # fmt: skip
LIMITS = Limits(ttft_s=2.0, tpot_s=0.08)
PHASES = (
    Phase(11.0, 9.0, 100, 0.3, 1000, 100),
    Phase(11.0, 5.2, 1100, 0.3, 4000, 6),
)
"""Decode first, then prefill."""

SYSTEMS = ("cache_load", "flowkv", "kvmesh")
"""`cache_load` keeps two and two."""


async def run(folder: Path, scale: float, seed: int) -> list[Row]:
    """All systems under the same loads, each from two and two."""
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
    home = "home:device:prefill:2,home:device:decode:2"
    rows: list[Row] = []
    first: dict[str, object] = {"routing.policy": SYSTEMS[0]}
    async with live_mesh(fleet, profile, LIMITS, first) as mesh:
        for number in range(ROUNDS):
            load = arrivals(phases, round_seed(seed, number))
            for system in order(SYSTEMS, number):
                if rows:
                    await mesh.use_scheduler({"routing.policy": system})
                row, _ = await mesh.load(system, load, seed + len(rows))
                switches = [e for e in await mesh.fleet_decisions() if e["kind"] == "switch"]
                # Who helps is called back when the load is over.
                await mesh.roles_are(2)
                twin = simulated(system, load, profile, home, LIMITS)
                row |= {"round": number + 1, "switches": len(switches), **twin}
                rows.append({"part": "FlowKV", **row})
                say(f"    {rows[-1]}")
    return rows + summaries(rows)


def judge(rows: Sequence[Row]) -> list[Target]:
    """What was to hold."""
    return [
        Target(f"FlowKV: {system} over fixed roles", gain(rows, system, "cache_load"), 1.0)
        for system in ("flowkv", "kvmesh")
    ]
