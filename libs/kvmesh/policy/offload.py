"""PrfaaS's short-term decisions: the cluster that prefills a prompt, and the threshold's
adjustment.

Source: PrfaaS 3.3 (threshold routing), 3.4.3 points 2-3.
Tests: tests/unit/policy/test_offload.py, tests/property/test_policy_properties.py.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class OffloadReason(enum.Enum):
    """Why a prompt is prefilled where it is."""

    SHORT = "the uncached part is within the threshold"
    LONG = "the uncached part is above the threshold"
    REMOTE_DOWN = "no remote instance takes the prompt"
    LOCAL_DOWN = "no local instance takes prompts"


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """The cluster that prefills a prompt (PrfaaS 3.4.3 point 3).

    Attributes:
        remote: whether it is the offload cluster.
        compared_tokens: uncached tokens that were compared with the threshold.
        uncached_tokens: tokens left to compute in the chosen cluster.
        moved_tokens: prefix tokens to transfer from the other cluster first.
    """

    remote: bool
    compared_tokens: int
    uncached_tokens: int
    moved_tokens: int
    reason: OffloadReason


@dataclass(frozen=True, slots=True)
class OffloadState:
    """Inputs of the choice of cluster besides the fleet view.

    Attributes:
        remote: name of the offload cluster, whose workers only prefill; empty if there is none.
        threshold_tokens: prompts with more uncached tokens go there (t in PrfaaS).
        link_has_room: whether the link out of the offload cluster has bandwidth for prefixes beside
            the prompts' KV.
    """

    remote: str = ""
    threshold_tokens: float = math.inf
    link_has_room: bool = False


@dataclass(frozen=True, slots=True)
class Reach:
    """Which clusters a route may use.

    Attributes:
        remote, local: whether the cluster has an instance that takes prompts.
        bandwidth_abundant: whether prefixes may move between the clusters.
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
    """Compares the uncached length with the threshold (PrfaaS 3.4.3 point 3).

    With scarce bandwidth only the local cluster's prefix counts. With abundant bandwidth the longer
    of both prefixes counts, and is transferred first if the other cluster computes.

    Args:
        remote_cached, local_cached: leading tokens cached in each cluster, by workers of any role.
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
    return OffloadChoice(remote, compared, total_tokens - own - moved, moved, reason)


# --- short-term adjustment of the threshold (PrfaaS 3.4.3 point 2) -------------------------------


class AdjustReason(enum.Enum):
    """Why the threshold moved, or not."""

    CALM = "link and queues are within their bounds"
    FAR_FULL = "the link or the remote cluster is full, and home has no room for its prompts"
    NEAR_FULL = "requests wait at home, and the remote cluster or the link has no room for them"
    LINK_FULL = "the link is nearly full, and at home nothing waits"
    REMOTE_SURGE = "requests wait for the remote cluster, and at home nothing does"
    LOCAL_SURGE = "requests wait at home, and the remote cluster and the link have room"
    BOTH_FULL = "both clusters are full: no threshold serves more than that of the model"
    RECOVERING = "link and queues have room again"
    HOLD = "between the bounds nothing changes"


@dataclass(frozen=True, slots=True)
class LinkState:
    """Measurements since the last adjustment.

    Attributes:
        utilisation: fraction of the egress bandwidth in use.
        remote_queue, local_queue: requests that wait for prefill in the cluster, per instance.
    """

    utilisation: float
    remote_queue: float = 0.0
    local_queue: float = 0.0


@dataclass(frozen=True, slots=True)
class AdjustLimits:
    """Bounds of link and queues; the gap between high and low is the hysteresis.

    Attributes:
        high_utilisation, low_utilisation: fractions of the egress bandwidth above which the link
            is full, and below which it has room for more prompts.
        high_queue: waiting requests per instance above which a cluster is full. It has room if
            none waits.
        step: factor per adjustment away from the base.
        back: fraction of the logarithmic distance to the base per adjustment back.
        max_factor: largest factor between the threshold and its base.
    """

    high_utilisation: float = 0.9
    low_utilisation: float = 0.7
    high_queue: float = 2.0
    step: float = 1.15
    back: float = 0.4
    max_factor: float = 8.0


@dataclass(frozen=True, slots=True)
class Threshold:
    """The routing threshold.

    Attributes:
        base_tokens: optimum of the last search (eqs. 7, 8); the threshold returns to it.
        tokens: the value in force.
        reason: why it moved to this value.
    """

    base_tokens: float
    tokens: float
    reason: AdjustReason = AdjustReason.CALM


def adjust_threshold(
    threshold: Threshold, link: LinkState, limits: AdjustLimits | None = None
) -> Threshold:
    """Moves the threshold away from a congested side while the other has room (3.4.3 point 2).

    A higher threshold sends fewer and longer prompts. Longer prompts make less KV per second of
    compute, so a full link is relieved twice. But the other prompts are then computed at home,
    where one long prompt takes the time of several short ones. If short ones wait there already,
    this costs more requests than it saves. With both sides congested no threshold beats the
    solution of eq. 7, so the threshold returns to it, as it does when neither is congested.
    """
    limits = limits or AdjustLimits()
    base, now = threshold.base_tokens, threshold.tokens
    is_full = link.utilisation > limits.high_utilisation
    is_far_full = is_full or link.remote_queue > limits.high_queue
    is_near_full = link.local_queue > limits.high_queue
    has_near_room = not link.local_queue
    has_far_room = not is_full and not link.remote_queue
    has_way_out = has_far_room and link.utilisation < limits.low_utilisation
    nearer = _back(base, now, limits.back)
    if is_far_full and has_near_room:
        reason = AdjustReason.LINK_FULL if is_full else AdjustReason.REMOTE_SURGE
        tokens = min(max(now * limits.step, nearer), base * limits.max_factor)
        return Threshold(base, tokens, reason)
    if is_near_full and has_way_out:
        tokens = max(min(now / limits.step, nearer), base / limits.max_factor)
        return Threshold(base, tokens, AdjustReason.LOCAL_SURGE)
    if is_far_full and is_near_full:
        return Threshold(base, nearer, AdjustReason.BOTH_FULL)
    if now == base:
        return Threshold(base, base, _full_side(is_far_full, is_near_full) or AdjustReason.CALM)
    # While the congestion that it moved away from lasts, a way back would only be undone.
    presses_far = link.utilisation >= limits.low_utilisation or not has_far_room
    if (presses_far and has_near_room) if now > base else (not has_near_room and has_far_room):
        return Threshold(base, now, AdjustReason.HOLD)
    reason = _full_side(is_far_full, is_near_full) or AdjustReason.RECOVERING
    return Threshold(base, nearer, reason)


def _full_side(is_far_full: bool, is_near_full: bool) -> AdjustReason | None:
    """Returns the reason for a full side that the other side, neither full nor free, cannot
    relieve.
    """
    if is_far_full:
        return AdjustReason.FAR_FULL
    return AdjustReason.NEAR_FULL if is_near_full else None


def _back(base: float, now: float, share: float) -> float:
    """Returns `now` moved one step towards `base`; within one percent it is `base`."""
    if now == base:
        return base
    tokens = now * (base / now) ** share
    return base if abs(tokens - base) < 0.01 * base else tokens
