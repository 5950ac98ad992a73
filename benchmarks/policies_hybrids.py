"""The default on workers without roles, beside itself with roles and beside other systems.

With loose limits such a fleet is to be as good as mixed workers, with tight ones as separated ones.
Rules and traces are those of the grid. Tests: tests/unit/benchmarks/test_policies_grid.py.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.policies_experiments import Experiment, Rows, Verdict
from benchmarks.policies_grid import (
    NUM_WORKERS,
    OURS,
    TPOT_MS,
    Entrant,
    Limits,
    Load,
    compare,
    entrants,
    jobs_of,
)
from benchmarks.result import Target
from kvmesh.sim.steps import ChunkTokens

NAME = "Hybrids"

LIMITS = tuple(Limits(tpot_ms) for tpot_ms in TPOT_MS[::2])
"""A loose limit and a tight one."""

WITH_ROLES = "with roles 6:4"

CHUNKS = ChunkTokens(512, 512)
"""Tokens of a step, as those of the mixed workers with small chunks."""


def hybrids(found: Sequence[Load]) -> Experiment:
    """Every load under both limits, with ten hybrids and with the systems of the grid."""
    with_roles, *others = entrants()
    fleet = f"home:a100:hybrid:{NUM_WORKERS}"
    ours = Entrant(OURS, with_roles.system, fleet, CHUNKS)
    systems = [ours, dataclasses.replace(with_roles, label=WITH_ROLES), *others]
    jobs = [
        job for load in found for limits in LIMITS for job in jobs_of(NAME, load, limits, systems)
    ]
    return Experiment(NAME, jobs, judge)


def judge(rows: Rows) -> Verdict:
    """The claims on both limits."""
    found = compare(list(rows.values()))
    targets: list[Target] = []
    for limits in LIMITS:
        cells = [each for each in found if each.tpot_ms == limits.tpot_ms]
        best = [each.ratio for each in cells]
        mixed = [each.over_mixed for each in cells]
        name = f"hybrids at {limits}"
        targets += [
            Target(f"{name}: over the best other, mean", statistics.geometric_mean(best), 1.0),
            Target(f"{name}: over the best mixed, least", min(mixed), 1.0),
        ]
    return Verdict(targets)
