"""All systems of `benchmarks.gateway` side by side, in turn in every phase, some rounds each.

A host does not run at one speed for minutes: of two systems measured one after the other, the ratio
is partly the host's. Here a round of a phase takes seconds and holds all systems, each round in
another order, and a row is the median of its rounds. The systems that wait for their turn
are idle; `idle_share` says what that costs the one that is measured.
Tests: tests/unit/benchmarks/test_gateway_rounds.py.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from benchmarks.gateway_load import Loader
from benchmarks.gateway_phases import PHASES, Bench, Phase, Plan
from benchmarks.gateway_systems import System
from benchmarks.gateway_traffic import prepare
from benchmarks.result import Row

Item = TypeVar("Item")

WORST = frozenset({"failed", "late"})
"""Of these the largest counts: what must not happen may not happen in any round."""

IDLE_S = 2.0


async def measure(systems: Sequence[System], plan: Plan, note: Callable[[Row], None]) -> list[Row]:
    """The rows of all systems, phase by phase.

    Args:
        note: told each round's row as soon as it is there.
    """
    benches = [Bench(system, Loader(system.endpoint), plan) for system in systems]
    rows: list[Row] = []
    try:
        for phase in PHASES:
            taking_part = [bench for bench in benches if phase.load in bench.system.loads]
            rows += await _measure_phase(phase, taking_part, plan, note)
    finally:
        for bench in benches:
            bench.loader.close()
    return rows


async def _measure_phase(
    phase: Phase, benches: Sequence[Bench], plan: Plan, note: Callable[[Row], None]
) -> list[Row]:
    measured: dict[str, list[Row]] = {bench.system.name: [] for bench in benches}
    rounds = min(plan.rounds, phase.most_rounds) * phase.more_rounds
    for number in range(rounds):
        prepare(plan.seed_of(number))
        for bench in in_order(benches, number, rounds):
            bench.turn = number
            row = await phase.run(bench)
            measured[bench.system.name].append(row)
            note(row)
    return [median_row(found, phase.main) for found in measured.values()]


def in_order(benches: Sequence[Item], number: int, rounds: int) -> Sequence[Item]:
    """The systems in the order of a round: each begins elsewhere, every second one backwards."""
    first = number * len(benches) // rounds
    turned = [*benches[first:], *benches[:first]]
    return turned if number % 2 == 0 else turned[::-1]


def median_row(rounds: Sequence[Row], main: str) -> Row:
    """One row for the rounds of a phase: medians, the worst of what must not happen.

    Args:
        main: the number whose spread is told, largest less smallest as a share of the median.
    """
    row: Row = {}
    for name, first in rounds[0].items():
        if isinstance(first, str):
            row[name] = first
            continue
        values = [each[name] for each in rounds if each[name] is not None]
        middle = max if name in WORST else statistics.median
        row[name] = _as_given(middle(values), values) if values else None
    values = [each[main] for each in rounds if each[main] is not None]
    if len(values) > 1 and row[main]:
        row["spread %"] = round(100 * (max(values) - min(values)) / row[main])
    return row


def _as_given(value: float, values: Sequence[float]) -> float:
    """A median as precise as what it is of."""
    return round(value) if all(isinstance(each, int) for each in values) else round(value, 2)


async def idle_share(systems: Sequence[System]) -> Mapping[str, float]:
    """The part of one core that each system takes while nothing is asked of it."""
    started, before = time.perf_counter(), [system.all_cpu_s for system in systems]
    await asyncio.sleep(IDLE_S)
    seconds = time.perf_counter() - started
    return {
        system.name: (system.all_cpu_s - cpu_s) / seconds
        for system, cpu_s in zip(systems, before, strict=True)
    }
