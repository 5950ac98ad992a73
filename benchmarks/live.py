"""What the four papers' mechanisms do in real processes, each against its baselines.

    python -m benchmarks.live [--part prfaas ...] [--scale 0.5] [--lanes 1] [--dry]

Services, Redis and workers are processes of their own; engines are modelled, with step times from
a profile that the simulator reads, too; KV is sent for real. Load is open-loop, through the
gateway. After every load nothing may be held anywhere. Tests: tests/unit/benchmarks/test_live.py.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import live_flowkv, live_pdserve, live_prfaas, live_tokenlake
from benchmarks.live_mesh import say
from benchmarks.result import RESULTS, Row, Target, document, markdown, save

NOTES = """\
times in milliseconds; `good` is the share of requests that were served within both limits of their
 part, refusals count against it
- `sim`: the same arrivals, profile, fleet and policy in the simulator, which knows nothing of the
 time that services, sockets and cores need
- egress is KV that left the far cluster (PrfaaS), elsewhere all KV that left any worker
- PrfaaS: the link is `tc tbf` between network namespaces; it falls to a third for half of each load
 of 5 requests/s, and the threshold is the model's for the distribution of lengths (until 2026-11-22
 for a quarter of 6 requests/s, and for the lengths of the first load. Over the low link the KV of
 one long prompt takes two to four cycles, so that a quarter held two or three transfers; that
 load's own optimum was 2148 tokens where the distribution's is about 1480, and together with the
 rate it filled home, where the rule rightly leaves the threshold alone)
- lift: mean threshold while the link is low over that while it is whole, settled, in a load of its
 own of 4 requests/s with the link to and fro (until 2026-11-22 the highest while it was low over
 the one when it fell, at least 1.3: in the simulator bursts alone do that in half of the loads,
 when the link does not fall at all; this one was 1.11 at most then, in 30 loads, and when it falls
 1.30 in the middle of 30, of which a tenth stayed below 1.11)
- rounds: each has a load of its own that all systems of the part get, in turning order; their
 ratios are medians of those of each round, and the row `all` is min / median / max
 (PrfaaS: all-local and all-remote have the first round only, and are compared within it)
- two parts run at a time, with meshes of their own: engines sleep most of their steps
- recovered: from the kill to the last arrival that was refused or late; the substitute is started
 at once""".replace("\n ", " ").split("\n- ")


@dataclass(frozen=True, slots=True)
class Part:
    """One comparison."""

    run: Callable[[Path, float, int], Awaitable[list[Row]]]
    judge: Callable[[list[Row]], list[Target]]


PARTS = {
    "prfaas": Part(live_prfaas.run, live_prfaas.judge),
    "flowkv": Part(live_flowkv.run, live_flowkv.judge),
    "forwarding": Part(live_pdserve.forwarding, live_pdserve.judge_forwarding),
    "ratio": Part(live_pdserve.ratio, live_pdserve.judge_ratio),
    "tokenlake": Part(live_tokenlake.run, live_tokenlake.judge),
    "recovery": Part(live_pdserve.recovery, live_pdserve.judge_recovery),
}
"""The longest first, so that all lanes end at about the same time."""


async def measure(
    names: Sequence[str], scale: float, seed: int, lanes: int
) -> tuple[list[Row], list[Target], float]:
    """Runs so many parts at a time; their rows, targets, and the seconds it took."""
    began = time.perf_counter()
    found: dict[str, list[Row]] = {}
    waiting = list(names)

    async def lane(folder: Path) -> None:
        while waiting:
            name = waiting.pop(0)
            say(f"[{len(found)}/{len(names)} done] {time.perf_counter() - began:4.0f} s  {name}")
            found[name] = await PARTS[name].run(folder, scale, seed)

    with tempfile.TemporaryDirectory(prefix="kvmesh-live-") as folder:
        async with asyncio.TaskGroup() as group:
            for _ in range(lanes):
                group.create_task(lane(Path(folder)))
    rows = [row for name in names for row in found[name]]
    targets = [target for name in names for target in PARTS[name].judge(found[name])]
    return rows, targets, time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the loads' lengths")
    parser.add_argument("--lanes", type=int, default=2, help="parts at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    chosen = parser.parse_args(argv)
    rows, targets, seconds = asyncio.run(
        measure(chosen.part, chosen.scale, chosen.seed, chosen.lanes)
    )
    result = document(rows, targets, chosen.seed, [*NOTES, f"took {seconds:.0f} s"])
    if not chosen.dry:
        save(result, RESULTS / "live.json")
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
