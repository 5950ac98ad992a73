"""Whether the KV of a sequence that is preempted is kept in host memory or computed again. Pure.

Tests: tests/unit/policy/test_preemption.py.
"""

from __future__ import annotations

from dataclasses import dataclass

SAMPLE_WEIGHT = 0.2
"""Share of the newest sample in a measured speed: about the last ten count."""
FADING = 0.05
"""Share by which copies seem cheaper after each time that none was made."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What this worker was measured at; 0 while unknown.

    Attributes:
        token_s: seconds per token of steps with prompts.
        byte_s: seconds per byte copied between the pool and host memory.
    """

    token_s: float = 0.0
    byte_s: float = 0.0


def with_sample(mean: float, sample: float) -> float:
    """A mean that forgets, after one more sample; the first sample is the mean."""
    return sample if mean == 0 else mean + SAMPLE_WEIGHT * (sample - mean)


def without_copy(speeds: Speeds) -> Speeds:
    """Speeds after a decision not to copy, which measures no copy.

    One slow copy would else decide for ever: its weight fades until a copy is tried again.
    """
    return Speeds(speeds.token_s, speeds.byte_s * (1 - FADING))


@dataclass(frozen=True, slots=True)
class PreemptionDecision:
    """What becomes of the KV.

    Attributes:
        swap: it is kept in host memory; else it is dropped and computed again.
        reason: in words, for logs.
    """

    swap: bool
    reason: str


def choose_preemption(num_tokens: int, num_bytes: int, speeds: Speeds) -> PreemptionDecision:
    """The cheaper of copying out and in and of computing again.

    What the prefix cache will still have of the sequence is not known at this time, and it is
    short of room by definition, so it counts for neither side.

    Args:
        num_tokens: positions whose KV would be lost.
        num_bytes: of the blocks that hold it.
    """
    if not (speeds.token_s and speeds.byte_s):
        return PreemptionDecision(swap=True, reason="copied to learn what that costs")
    copy_s, compute_s = 2 * num_bytes * speeds.byte_s, num_tokens * speeds.token_s
    swap = copy_s < compute_s
    return PreemptionDecision(
        swap, f"copying twice takes {copy_s:.4f} s, computing again {compute_s:.4f} s"
    )
