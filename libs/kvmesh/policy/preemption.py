"""Decides whether a preempted sequence's KV is swapped to host memory or recomputed. Pure.

Tests: tests/unit/policy/test_preemption.py.
"""

from __future__ import annotations

from dataclasses import dataclass

SAMPLE_WEIGHT = 0.2
"""Weight of the newest sample in a measured speed: about the last ten count."""
FADING = 0.05
"""Fraction by which the estimated cost of a copy falls after each decision not to copy."""


def with_sample(mean: float, sample: float) -> float:
    """Returns the exponential moving mean after one more sample; the first sample is the mean."""
    return sample if mean == 0 else mean + SAMPLE_WEIGHT * (sample - mean)


def without_copy(byte_s: float) -> float:
    """Returns the seconds per copied byte after a decision not to copy.

    No copy means no new measurement, and one slow copy would otherwise decide forever. Its estimate
    fades until a copy is tried again.
    """
    return byte_s * (1 - FADING)


@dataclass(frozen=True, slots=True)
class PreemptionDecision:
    """Decision about the KV of a preempted sequence.

    Attributes:
        swap: whether it is kept in host memory; else it is dropped and recomputed.
        reason: in words, for logs.
    """

    swap: bool
    reason: str


def choose_preemption(compute_s: float, num_bytes: int, byte_s: float) -> PreemptionDecision:
    """Chooses the cheaper of copying out and back in, and recomputing.

    The prefix cache counts for neither: how much of the sequence it will still hold is not known,
    and at a preemption it is short of room by definition.

    Args:
        compute_s: seconds to compute the KV that would be lost; 0 while unknown.
        num_bytes: bytes of the blocks that hold it.
        byte_s: seconds per byte copied between the pool and host memory; 0 while unknown.
    """
    if not (compute_s and byte_s):
        return PreemptionDecision(swap=True, reason="copied to learn what that costs")
    copy_s = 2 * num_bytes * byte_s
    swap = copy_s < compute_s
    return PreemptionDecision(
        swap, f"copying twice takes {copy_s:.4f} s, computing again {compute_s:.4f} s"
    )
