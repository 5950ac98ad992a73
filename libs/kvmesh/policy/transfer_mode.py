"""When the KV of a prompt leaves the prefill worker. Pure.

Tests: tests/unit/policy/test_transfer_mode.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvmesh.policy.link import LinkView


class TransferMode(enum.Enum):
    """What leaves when.

    There is no mode by layer: a block holds all layers in one range of bytes, so one layer of a run
    is a strided set of small pieces, as many calls as the layout was made to avoid.
    """

    WHOLE = "whole"
    """All blocks in one call, after the first token."""
    CHUNKED = "chunked"
    """The blocks of each finished chunk, while the next one computes."""


@dataclass(frozen=True, slots=True)
class ModeDecision:
    """A mode and why."""

    mode: TransferMode
    reason: str


@dataclass(frozen=True, slots=True)
class TransferTask:
    """What is to be moved.

    Attributes:
        num_bytes: KV to send.
        num_chunks: steps that the prompt is computed in; 1 leaves nothing to overlap with.
    """

    num_bytes: int
    num_chunks: int


FAST_ENOUGH_S = 0.002
"""A transfer this short is not worth an interruption of the computation."""


def choose_transfer_mode(task: TransferTask, link: LinkView | None) -> ModeDecision:
    """Chunked pays when the transfer is long enough to be seen behind the last chunk.

    Sending a chunk costs both workers some time in the middle of their steps; what it hides is the
    transfer of all chunks but the last.

    Args:
        task: what is to be moved.
        link: the way there; None before anything was sent.
    """
    if task.num_chunks <= 1:
        return ModeDecision(TransferMode.WHOLE, "one chunk: nothing to overlap with")
    estimate_s = link.estimate_s(task.num_bytes) if link is not None else None
    if estimate_s is None:
        return ModeDecision(TransferMode.CHUNKED, "the link's speed is not known yet")
    if estimate_s <= FAST_ENOUGH_S:
        return ModeDecision(TransferMode.WHOLE, f"{estimate_s * 1e3:.2f} ms in one call")
    return ModeDecision(TransferMode.CHUNKED, f"{estimate_s * 1e3:.1f} ms would follow the prompt")
