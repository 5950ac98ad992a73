"""Inputs of a simulation: fleet, system, requests, failures, objectives.

Tests: tests/unit/sim/test_scenario.py.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from kvmesh.core.errors import ConfigError
from kvmesh.core.named_values import listed
from kvmesh.policy.global_lru import PoolEviction
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.sim.fleet import WorkerGroup
from kvmesh.sim.profile import Profile
from kvmesh.sim.steps import ChunkTokens
from kvmesh.sim.systems import System
from kvmesh.sim.tiers import TierSizes
from kvmesh.sim.trace_request import TraceRequest


class FailureKind(enum.Enum):
    """Kind of a scheduled failure."""

    KILL = "kill"
    RESTART = "restart"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Failure:
    """An entry of the failure schedule.

    Attributes:
        index: index of the worker in the fleet's order; for KILL and RESTART.
        factor: factor on the bandwidth out of the remote cluster from then on; for LINK.
    """

    at_s: float
    kind: FailureKind
    index: int = 0
    factor: float = 1.0


def parse_failures(text: str) -> tuple[Failure, ...]:
    """Parses a schedule such as `10:kill:0,20:restart:0,30:link:0.33`.

    Raises:
        ConfigError: an entry is wrong.
    """
    failures: list[Failure] = []
    for part in listed(text):
        try:
            moment, name, value = part.split(":")
            kind = FailureKind(name)
            if kind is FailureKind.LINK:
                failures.append(Failure(float(moment), kind, factor=float(value)))
            else:
                failures.append(Failure(float(moment), kind, index=int(value)))
        except ValueError as error:
            raise ConfigError(
                f"{part!r} is not SECONDS:kill|restart|link:VALUE, such as 10:kill:0"
            ) from error
        if failures[-1].at_s < 0 or failures[-1].factor <= 0 or failures[-1].index < 0:
            raise ConfigError(f"{part!r}: times and indices are not negative, factors above 0")
    return tuple(failures)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits that a request must keep to count as goodput.

    Attributes:
        timeouts: longest time to the first token by prompt length; later ones are failures.
        tpot_s: longest mean time per token.
        itl_s: ITL limit in seconds that workers know; infinite for none. It does not count for
            goodput.
    """

    timeouts: tuple[TimeoutTier, ...] = (TimeoutTier(8192, 5.0), TimeoutTier(1 << 62, 30.0))
    tpot_s: float = 0.1
    itl_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run.

    Attributes:
        requests: sorted by arrival; in a closed loop only the first arrival of a session counts.
        closed_loop: whether the next turn of a session arrives `think_s` after the answer.
        jitter: fraction by which transfers take longer at most, at random; 0.1 is 10 %.
        sample_s: seconds between two samples of the timelines.
        chains: whether workers compute parts of long prompts for each other.
        tiers: sizes and speeds of the tiers below the pools of all workers.
        eviction: whether workers or the fleet choose evictions.
    """

    profile: Profile
    fleet: tuple[WorkerGroup, ...]
    system: System
    requests: tuple[TraceRequest, ...]
    closed_loop: bool = False
    failures: tuple[Failure, ...] = ()
    objectives: Objectives = Objectives()
    seed: int = 0
    chunks: ChunkTokens = ChunkTokens()
    jitter: float = 0.1
    sample_s: float = 10.0
    chains: bool = False
    tiers: TierSizes = TierSizes()
    eviction: PoolEviction = PoolEviction.LOCAL


def accepted_tpot_s(scenario: Scenario) -> float:
    """Returns the TPOT limit that the system knows: the smaller of the TPOT and the ITL limit.

    In seconds; infinite if the system ignores limits.
    """
    limits = scenario.objectives
    return min(limits.tpot_s, limits.itl_s) if scenario.system.knows_tpot else math.inf


def accepted_itl_s(scenario: Scenario) -> float:
    """Returns the ITL limit that the system knows, in seconds; infinite if it ignores limits."""
    return scenario.objectives.itl_s if scenario.system.knows_tpot else math.inf
