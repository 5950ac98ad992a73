"""The rate up to which a plan's requests get their first token in time.

PrfaaS's model (eqs. 3-6) gives the rate at which the slowest stage is always busy: queues would
then grow without end. It also takes the time of the mean length for the mean time, and counts
decode slots from the first token on. This module adds the missing terms: waits of M/G/c queues
(Allen and Cunneen's approximation, with an exponential tail), the mean of the times over all
lengths, and slots that are held while the prompt is computed.
Tests: tests/unit/sim/test_plan_ttft.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.prfaas import Hardware, OperatingPoint, ServingProfile

NUM_LENGTHS = 400
"""Number of equally likely lengths that stand for the distribution."""

IN_TIME = 0.9
"""Fraction of the requests whose first token is in time at the returned rate."""

PRECISION = 1e-3
"""Relative error of that rate."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A stage with equal servers and Poisson arrivals.

    Attributes:
        load: arrivals per second times mean seconds of service.
        service_s: mean seconds of service.
        spread: square of the deviation over the mean of these.
    """

    servers: float
    load: float
    service_s: float
    spread: float

    @property
    def is_stable(self) -> bool:
        """Whether the stage keeps up with the arrivals."""
        return self.load < self.servers

    @property
    def chance(self) -> float:
        """Chance that an arrival waits (Erlang C)."""
        blocked = 1.0
        for servers in range(1, max(round(self.servers), 1) + 1):
            blocked = self.load * blocked / (servers + self.load * blocked)
        return blocked / (1.0 - self.load / self.servers * (1.0 - blocked))

    @property
    def wait_s(self) -> float:
        """Mean seconds of waiting, of the arrivals that wait."""
        return self.service_s * (1.0 + self.spread) / 2.0 / (self.servers - self.load)


def queue(servers: float, rate: float, times_s: Sequence[float]) -> Queue:
    """Returns a stage for equally likely times of service."""
    mean = sum(times_s) / len(times_s)
    variance = sum((each - mean) ** 2 for each in times_s) / len(times_s)
    return Queue(servers, rate * mean, mean, variance / (mean * mean))


def _in_time(stage: Queue, times_s: Sequence[float], limit_s: float) -> float:
    """Returns the fraction of requests that are served within a limit."""
    chance, wait_s = stage.chance, stage.wait_s
    kept = 0.0
    for each in times_s:
        left_s = limit_s - each
        kept += 1.0 - chance * math.exp(-left_s / wait_s) if left_s >= 0.0 else 0.0
    return kept / len(times_s)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Prefill instances and their requests.

    Attributes:
        share: fraction of all requests.
    """

    servers: int
    share: float
    times_s: tuple[float, ...]


def _stages(
    profile: ServingProfile, lengths: LengthDistribution, hardware: Hardware, point: OperatingPoint
) -> list[_Stage]:
    tokens = [lengths.quantile((each + 0.5) / NUM_LENGTHS) for each in range(NUM_LENGTHS)]
    sides: tuple[tuple[int, Callable[[float], float], list[float]], ...] = (
        (
            hardware.num_remote,
            profile.remote_prefill_s,
            [each for each in tokens if each > point.threshold_tokens],
        ),
        (
            point.num_prefill,
            profile.local_prefill_s,
            [each for each in tokens if each <= point.threshold_tokens],
        ),
    )
    return [
        _Stage(servers, len(own) / NUM_LENGTHS, tuple(map(time_s, own)))
        for servers, time_s, own in sides
        if own
    ]


def share_in_time(
    profile: ServingProfile,
    lengths: LengthDistribution,
    hardware: Hardware,
    point: OperatingPoint,
    rate: float,
    limit_s: float,
) -> float:
    """Returns the fraction of requests with their first token within a limit at a rate, 0..1.

    0 if a stage cannot serve the rate. The egress is not part of it: KV leaves while the next
    layers are computed, and `OperatingPoint.rate` has its limit.
    """
    stages = _stages(profile, lengths, hardware, point)
    queues = [queue(each.servers, rate * each.share, each.times_s) for each in stages]
    if not all(each.is_stable for each in queues):
        return 0.0
    # A slot is reserved before the prompt is computed, and held until the answer ends.
    before_s = sum(
        stage.share * (each.service_s + each.chance * each.wait_s)
        for stage, each in zip(stages, queues, strict=True)
    )
    held_s = before_s + profile.decode_step_s * profile.output_tokens
    slots = Queue(point.num_decode * profile.decode_batch, rate * held_s, held_s, 1.0)
    if not slots.is_stable:
        return 0.0
    left_s = limit_s - slots.chance * slots.wait_s
    return sum(
        stage.share * _in_time(each, stage.times_s, left_s)
        for stage, each in zip(stages, queues, strict=True)
    )


def rate_in_time(
    profile: ServingProfile,
    lengths: LengthDistribution,
    hardware: Hardware,
    point: OperatingPoint,
    limit_s: float,
) -> float:
    """Returns the highest rate at which `IN_TIME` of the first tokens come within a limit.

    In requests per second, at most the point's own rate; 0 if not even a lone prompt is in time.
    """

    def holds(rate: float) -> bool:
        return share_in_time(profile, lengths, hardware, point, rate, limit_s) >= IN_TIME

    low, high = 0.0, point.rate
    if not holds(high * PRECISION):
        return 0.0
    while high - low > PRECISION * point.rate:
        middle = (low + high) / 2.0
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
