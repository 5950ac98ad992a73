"""How the workers of a simulated fleet work. Tests: tests/unit/sim/test_worker.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
