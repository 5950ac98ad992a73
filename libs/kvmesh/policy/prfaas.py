"""PrfaaS's throughput model and its optimum.

The model gives the requests per second of the three stages (prefill in the offload cluster, prefill
at home, decode). Its optimum is the threshold and the split of instances with the highest rate.

Source: PrfaaS 3.4.1 (eqs. 3-6), 3.4.2 (eqs. 7-8). Routing by the threshold is in `offload.py`.
Tests: tests/unit/policy/test_prfaas.py, tests/property/test_policy_properties.py.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.policy.curves import Curve
from kvmesh.policy.lengths import LengthDistribution

GRID_POINTS = 1500
"""Number of quantiles of the prompt lengths that the search tries as thresholds."""


@dataclass(frozen=True, slots=True)
class ServingProfile:
    """Measured costs of one model on the hardware of both clusters.

    Attributes:
        remote_prefill_s: T_prefill on an instance of the offload cluster, of uncached tokens.
        local_prefill_s: T_prefill on an instance at home.
        kv_bytes: S_kv, bytes of KV of a request with so many tokens.
        decode_batch: BS_max, the largest batch that keeps the SLO.
        decode_step_s: T_decode of that batch.
        output_tokens: L_out, mean tokens generated.
    """

    remote_prefill_s: Curve
    local_prefill_s: Curve
    kv_bytes: Curve
    decode_batch: float
    decode_step_s: float
    output_tokens: float

    @property
    def decode_rate(self) -> float:
        """Requests per second of one decode instance (eq. 5)."""
        return self.decode_batch / (self.decode_step_s * self.output_tokens)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Instances to plan for.

    Attributes:
        num_remote: N_prfaas, prefill instances of the offload cluster.
        num_local: N_p + N_d, instances at home.
        egress_bytes_per_s: B_out, the offload cluster's egress bandwidth.
    """

    num_remote: int
    num_local: int
    egress_bytes_per_s: float


class Limit(enum.Enum):
    """The stage that limits the rate: the smallest term of eq. 6."""

    REMOTE_COMPUTE = "remote prefill compute"
    EGRESS = "egress bandwidth"
    LOCAL_PREFILL = "local prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The model's answer for one threshold and split; rates in requests per second.

    Attributes:
        threshold_tokens: t, uncached tokens above which prompts are prefilled remotely; inf: none.
        num_prefill, num_decode: N_p and N_d, the split of the local instances.
        share_remote: p, fraction of the requests above the threshold.
        long_tokens, short_tokens: mean length above and up to the threshold.
        remote_rate, local_rate, decode_rate: Theta of the three stages (eqs. 3-5).
        rate: Lambda_max (eq. 6).
        limit: the stage that limits it.
        egress_bytes_per_s: KV that leaves the offload cluster at that rate.
    """

    threshold_tokens: float
    num_prefill: int
    num_decode: int
    share_remote: float
    long_tokens: float
    short_tokens: float
    remote_rate: float
    local_rate: float
    decode_rate: float
    rate: float
    limit: Limit
    egress_bytes_per_s: float

    @property
    def prefill_ceiling(self) -> float:
        """Requests per second that both prefill stages together allow at this threshold."""
        remote = _divide(self.remote_rate, self.share_remote)
        return min(remote, _divide(self.local_rate, 1.0 - self.share_remote))


def _divide(rate: float, share: float) -> float:
    """Returns the total rate that a stage with `share` of the requests allows; infinite for 0."""
    return rate / share if share > 0 else math.inf


def operating_point(
    profile: ServingProfile,
    lengths: LengthDistribution,
    hardware: Hardware,
    threshold_tokens: float,
    num_prefill: int,
) -> OperatingPoint:
    """Eqs. 3-6 for one threshold and one split of the local instances.

    Args:
        lengths: distribution of uncached prompt tokens.
        num_prefill: N_p; the other local instances decode.
    """
    share = lengths.share_above(threshold_tokens)
    long_tokens = lengths.mean_above(threshold_tokens)
    short_tokens = lengths.mean_to(threshold_tokens)
    compute = egress = local = 0.0
    if hardware.num_remote and share:
        compute = hardware.num_remote / profile.remote_prefill_s(long_tokens)
        egress = hardware.egress_bytes_per_s / profile.kv_bytes(long_tokens)
    if num_prefill and share < 1:
        local = num_prefill / profile.local_prefill_s(short_tokens)
    decode = (hardware.num_local - num_prefill) * profile.decode_rate
    terms = {
        Limit.REMOTE_COMPUTE: _divide(compute, share),
        Limit.EGRESS: _divide(egress, share),
        Limit.LOCAL_PREFILL: _divide(local, 1.0 - share),
        Limit.DECODE: decode,
    }
    limit = min(terms, key=lambda term: terms[term])
    rate = terms[limit]
    return OperatingPoint(
        threshold_tokens=threshold_tokens,
        num_prefill=num_prefill,
        num_decode=hardware.num_local - num_prefill,
        share_remote=share,
        long_tokens=long_tokens,
        short_tokens=short_tokens,
        remote_rate=min(compute, egress),
        local_rate=local,
        decode_rate=decode,
        rate=rate,
        limit=limit,
        egress_bytes_per_s=rate * share * profile.kv_bytes(long_tokens) if share else 0.0,
    )


def threshold_grid(lengths: LengthDistribution, num_points: int = GRID_POINTS) -> list[float]:
    """Returns the thresholds to try: 0 (all remote), the quantiles, and infinity (all local)."""
    inner = {round(lengths.quantile(index / num_points)) for index in range(num_points)}
    return [0.0, *sorted(inner - {0}), math.inf]


def search(
    profile: ServingProfile,
    lengths: LengthDistribution,
    hardware: Hardware,
    thresholds: Sequence[float] | None = None,
    splits: Iterable[int] | None = None,
) -> list[OperatingPoint]:
    """Returns every point of the grid of thresholds and splits (3.4.2).

    Args:
        thresholds: None for `threshold_grid`.
        splits: numbers of local prefill instances to try; None for all.
    """
    if thresholds is None:
        thresholds = threshold_grid(lengths)
    if splits is None:
        splits = range(hardware.num_local + 1)
    return [
        operating_point(profile, lengths, hardware, threshold, num_prefill)
        for num_prefill in splits
        for threshold in thresholds
    ]


def optimum(points: Iterable[OperatingPoint]) -> OperatingPoint:
    """Returns the point with the highest rate.

    If decode limits, a range of thresholds has the same rate. Of these, the solution of eq. 7 (both
    prefill stages equally far from their limit) leaves the most room.
    """
    return max(points, key=lambda point: (point.rate, point.prefill_ceiling))
