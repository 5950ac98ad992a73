"""A fleet that is run while requests run: groups, faults, substitutes, each under load.

    python -m benchmarks.fleet [--part upgrade ...] [--engine fake] [--scale 0.5] [--dry]

Each part starts `kvmesh up`, as a user would, and does to it what is measured; restarts start
services one by one, two of each. All parts run with fake engines and with KVMesh's own. Every
answer is compared with that of an undisturbed engine. Tests: tests/unit/benchmarks/test_fleet.py.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import fleet_faults, fleet_groups, fleet_restarts
from benchmarks.fleet_engines import ENGINES, FleetEngine
from benchmarks.fleet_load import say
from benchmarks.result import RESULTS, Row, Target, document, markdown, save

NOTES = """\
engine: a fake one sleeps for a step's time; KVMesh's own computes the model of 6M parameters in
 fp32, and sleeps for what is left of that time, since workers here share two cores
- clients ask one request after the other; p99 is of the times to the last token; `failed` are all
 requests without a whole answer, `wrong` those whose tokens are not an undisturbed engine's
- isolation: group `calm`, two clients, alone, then beside group `any` with 20 clients, two of which
 would keep its prefill worker busy, then alone again; steps of 0.3 s, so that what a busy machine
 adds counts little
- upgrade: two clients of each of three groups; `kvmesh group` is told what to do, and the
 scheduler is killed with SIGKILL as soon as the group is in the state that the row says
- substitute: a decode worker is killed with SIGKILL in a stack in which the way of that row costs
 least; `full capacity` is from the kill until as many as before decode; `substitutes` are workers
 that took the place, its own next life not counted
- restart: two kvmanagers, schedulers, gateways, prefill and decode workers, and Redis with a
 replica and three sentinels; each is ended with SIGTERM and started again, in a random order, under
 eight streams; `done` is until all know of it again
- ejection: eight workers and eight clients; from the fault until the fleet, as gateways see it,
 has the worker as one that is tried last, and takes nothing new. Whoever computed a damaged
 sequence is tried last, and ejected when no other worker has one as well; `met it` are requests
 that the worker had until it was ejected, that it lost, or that waited for its answer in vain; p99
 is of all others that ran beside the fault. Cut off: the process is stopped, so that its
 connections stay and nothing passes\
""".replace("\n ", " ").split("\n- ")


@dataclass(frozen=True, slots=True)
class Part:
    """One table."""

    run: Callable[[Path, float, FleetEngine], Awaitable[list[Row]]]
    judge: Callable[[Sequence[Row]], list[Target]]


PARTS = {
    "isolation": Part(fleet_groups.isolation, fleet_groups.judge_isolation),
    "upgrade": Part(fleet_groups.upgrade, fleet_groups.judge_upgrade),
    "substitutes": Part(fleet_faults.substitutes, fleet_faults.judge_substitutes),
    "restarts": Part(fleet_restarts.rolling, fleet_restarts.judge_rolling),
    "ejection": Part(fleet_faults.ejection, fleet_faults.judge_ejection),
}


async def measure(
    names: Sequence[str], engines: Sequence[str], scale: float
) -> tuple[list[Row], list[Target]]:
    """Rows and targets of these parts with each of these engines."""
    rows: list[Row] = []
    targets: list[Target] = []
    with tempfile.TemporaryDirectory(prefix="kvmesh-fleet-") as folder:
        for engine, name in itertools.product(engines, names):
            say(f"{name}, {engine} engine")
            own = Path(folder) / f"{engine}-{name}"
            own.mkdir()
            found = await PARTS[name].run(own, scale, ENGINES[engine])
            rows += [{"engine": engine, **row} for row in found]
            targets += [
                replace(target, name=f"{engine} engine, {target.name}")
                for target in PARTS[name].judge(found)
            ]
    return rows, targets


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--engine", choices=ENGINES, nargs="+", default=list(ENGINES))
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the loads' lengths")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    chosen = parser.parse_args(argv)
    began = time.perf_counter()
    rows, targets = asyncio.run(measure(chosen.part, chosen.engine, chosen.scale))
    took = f"took {time.perf_counter() - began:.0f} s"
    result = document(rows, targets, 1, [*NOTES, took])
    if not chosen.dry:
        save(result, RESULTS / "fleet.json")
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
