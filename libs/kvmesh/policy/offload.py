"""PrfaaS's fast time scale: which cluster prefills a prompt, and a threshold that follows the link.

Source: PrfaaS 3.3 (threshold routing), 3.4.3 points 2-3.
Tests: tests/unit/policy/test_offload.py, tests/property/test_policy_prfaas.py.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass


class OffloadReason(enum.Enum):
    """Why a prompt is prefilled where it is."""

    SHORT = "the uncached part is within the threshold"
    LONG = "the uncached part is above the threshold"
    REMOTE_DOWN = "no remote instance takes prompts"
    LOCAL_DOWN = "no local instance takes prompts"


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """Where to prefill.

    Attributes:
        uncached_tokens: what is left to compute there.
        moved_tokens: prefix to bring from the other cluster first.
    """

    remote: bool
    uncached_tokens: int
    moved_tokens: int
    reason: OffloadReason


@dataclass(frozen=True, slots=True)
class Reach:
    """What a route may use.

    Attributes:
        remote, local: whether the cluster has an instance that takes prompts.
        bandwidth_abundant: prefixes may be moved between the clusters.
    """

    remote: bool = True
    local: bool = True
    bandwidth_abundant: bool = False


def choose_cluster(
    total_tokens: int,
    remote_cached: int,
    local_cached: int,
    threshold_tokens: float,
    reach: Reach,
) -> OffloadChoice:
    """Compares the uncached length with the threshold (3.4.3 point 3).

    With scarce bandwidth each cluster counts its own prefix, and the local one decides. With
    abundant bandwidth the longer prefix counts, wherever it is, and is moved if need be.

    Args:
        remote_cached, local_cached: leading tokens cached in each cluster.
    """
    assert reach.remote or reach.local, "no cluster is left"
    best = max(remote_cached, local_cached)
    compared = total_tokens - (best if reach.bandwidth_abundant else local_cached)
    remote = compared > threshold_tokens
    reason = OffloadReason.LONG if remote else OffloadReason.SHORT
    if remote and not reach.remote:
        remote, reason = False, OffloadReason.REMOTE_DOWN
    elif not remote and not reach.local:
        remote, reason = True, OffloadReason.LOCAL_DOWN
    own = remote_cached if remote else local_cached
    moved = best - own if reach.bandwidth_abundant else 0
    return OffloadChoice(remote, total_tokens - own - moved, moved, reason)


# --- the threshold in the short term (3.4.3 point 2) ----------------------------------------------


class AdjustReason(enum.Enum):
    """Why the threshold moved, or not."""

    CALM = "link and queue are within their bounds"
    LINK_FULL = "the link is nearly full"
    QUEUE_SURGE = "requests wait for the remote cluster"
    RECOVERING = "the link has room again"
    HOLD = "between the bounds nothing changes"


@dataclass(frozen=True, slots=True)
class LinkState:
    """What was measured since the last adjustment.

    Attributes:
        utilisation: share of the egress bandwidth in use.
        queue_per_instance: requests that wait for a remote prefill instance.
    """

    utilisation: float
    queue_per_instance: float


@dataclass(frozen=True, slots=True)
class AdjustLimits:
    """Bounds; the gap between high and low is the hysteresis.

    Attributes:
        grow: factor per adjustment upwards.
        shrink: factor per adjustment back to the base.
        max_factor: the threshold goes to at most this many times the base.
    """

    high_utilisation: float = 0.9
    low_utilisation: float = 0.7
    high_queue: float = 2.0
    low_queue: float = 0.5
    grow: float = 1.15
    shrink: float = 0.95
    max_factor: float = 8.0


@dataclass(frozen=True, slots=True)
class Threshold:
    """The routing threshold.

    Attributes:
        base_tokens: from the last search; the threshold returns to it.
        tokens: in force now, never below the base.
    """

    base_tokens: float
    tokens: float
    reason: AdjustReason = AdjustReason.CALM


def adjust_threshold(
    threshold: Threshold, link: LinkState, limits: AdjustLimits | None = None
) -> Threshold:
    """Raises the threshold fast while the remote path is congested; lowers it slowly afterwards.

    A higher threshold sends fewer and longer prompts, and longer ones make less KV per second of
    compute, so the link is relieved twice.
    """
    limits = limits or AdjustLimits()
    full = link.utilisation > limits.high_utilisation
    surge = link.queue_per_instance > limits.high_queue
    if full or surge:
        tokens = min(threshold.tokens * limits.grow, threshold.base_tokens * limits.max_factor)
        reason = AdjustReason.LINK_FULL if full else AdjustReason.QUEUE_SURGE
        return dataclasses.replace(threshold, tokens=tokens, reason=reason)
    if threshold.tokens <= threshold.base_tokens:
        return dataclasses.replace(threshold, reason=AdjustReason.CALM)
    calm = link.utilisation < limits.low_utilisation and link.queue_per_instance < limits.low_queue
    if not calm:
        return dataclasses.replace(threshold, reason=AdjustReason.HOLD)
    tokens = max(threshold.tokens * limits.shrink, threshold.base_tokens)
    return dataclasses.replace(threshold, tokens=tokens, reason=AdjustReason.RECOVERING)


def is_bandwidth_abundant(was_abundant: bool, utilisation: float) -> bool:
    """Whether prefixes may be moved between clusters; becomes so below 50 % use, ends at 80 %."""
    return utilisation < (0.8 if was_abundant else 0.5)
