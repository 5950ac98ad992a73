"""Rules of a simulated fleet's workers. Tests: tests/unit/sim/test_worker.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmesh.core.types import Role
from kvmesh.policy.step_rules import StepRules, step_rules
from kvmesh.sim.steps import ChunkTokens
from kvmesh.sim.tiers import TierSizes


@dataclass(frozen=True, slots=True)
class WorkerRules:
    """Rules that all workers of a fleet follow.

    Attributes:
        queue_offers: whether prompts beyond the slots go into a local queue.
        chunks: token budget of a step.
        tpot_s: TPOT limit of all requests in seconds; infinite for none.
        itl_s: ITL limit of all requests in seconds; infinite for none.
        chains: whether workers compute parts of prompts for each other.
        tiers: sizes and speeds of the tiers below their pools.
    """

    queue_offers: bool = False
    chunks: ChunkTokens = ChunkTokens()
    tpot_s: float = math.inf
    itl_s: float = math.inf
    chains: bool = False
    tiers: TierSizes = TierSizes()

    def steps_of(self, role: Role) -> StepRules:
        """Returns the order within steps of a worker with this role."""
        has_limits = min(self.tpot_s, self.itl_s) < math.inf
        return step_rules(role, has_limits=has_limits, limit=None)
